"""Request state on the device: columns as declarations, tables made of them, and the updates that the host sends."""
