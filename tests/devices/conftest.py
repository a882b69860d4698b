from on_simulated import outcomes  # noqa: F401  a fixture
