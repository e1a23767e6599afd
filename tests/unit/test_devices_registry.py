"""Finding a device: by name, by torch device, by entry point, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phonograph import DeviceError, EmulatedDevice, open_device
from phonograph.devices import device_names

PACKAGE = """
from phonograph.devices import EmulatedDevice

class Blackbird(EmulatedDevice):
    name = "blackbird"

    def __init__(self, place):
        super().__init__()
        self.place = place
"""


@pytest.fixture
def blackbird(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that adds a device for the torch device type xpu."""
    (tmp_path / "blackbird_device.py").write_text(PACKAGE)
    info = tmp_path / "blackbird-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: blackbird\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[phonograph.devices]\nxpu = blackbird_device:Blackbird\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("spec", ["emulated", "cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_the_cpu_is_the_emulated_device(spec: str | torch.device) -> None:
    device = open_device(spec)
    assert isinstance(device, EmulatedDevice)
    assert device.torch_device == torch.device("cpu")


def test_an_instance_passes_through() -> None:
    device = EmulatedDevice(poison=True)
    assert open_device(device) is device


def test_nothing_asked_for_is_the_accelerator_present_or_the_cpu() -> None:
    assert open_device().name == open_device(None).name == ("cuda" if torch.cuda.is_available() else "emulated")


@pytest.mark.parametrize(
    ("asked", "meant"), [("emulate", "emulated"), ("cud:1", "cuda"), ("Cuda", "cuda"), ("cup", "cpu")]
)
def test_an_unknown_name_is_refused_with_the_nearest(asked: str, meant: str) -> None:
    with pytest.raises(DeviceError) as caught:
        open_device(asked)
    assert f"opening device {asked!r}: no such device; did you mean {meant!r}?" in str(caught.value)
    for name in device_names():
        assert name in str(caught.value)


def test_an_unknown_name_that_is_near_nothing_lists_the_known() -> None:
    with pytest.raises(DeviceError, match=r"'zzz': no such device\. Use one of cpu, cuda, emulated\."):
        open_device("zzz")


@pytest.mark.parametrize("spec", ["cuda:x", "cuda:", "cuda:-1", "cuda:1.5", "cuda:0:1", "emulated:one"])
def test_an_index_that_is_no_number_is_refused(spec: str) -> None:
    with pytest.raises(DeviceError, match=r"is not an index\. Write"):
        open_device(spec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("spec", ["cuda", "cuda:1", torch.device("cuda")])
def test_cuda_without_a_gpu_says_what_to_use(spec: str | torch.device) -> None:
    with pytest.raises(DeviceError, match="device='cpu'"):
        open_device(spec)


def test_names_are_sorted() -> None:
    assert device_names() == ["cpu", "cuda", "emulated"]


@pytest.mark.usefixtures("blackbird")
@pytest.mark.parametrize(("spec", "place"), [("xpu", "xpu"), ("xpu:2", "xpu:2"), (torch.device("xpu", 1), "xpu:1")])
def test_a_package_adds_a_device_by_entry_point(spec: str | torch.device, place: str) -> None:
    device = open_device(spec)
    assert device.name == "blackbird"
    assert device.place == torch.device(place)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("blackbird")
def test_a_device_of_a_package_is_among_the_names() -> None:
    assert device_names() == ["cpu", "cuda", "emulated", "xpu"]
    with pytest.raises(DeviceError, match="did you mean 'xpu'"):
        open_device("xpuu")
    assert open_device("emulated").name == "emulated"
