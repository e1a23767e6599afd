"""Planning: settings, rules, and the plan that is made of them; flags."""
