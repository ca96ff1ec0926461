import sys

MODULE = ("-m", "torch_openreg")


def test_it_prints_devices_memory_lanes_versions_and_settings(run):
    done = run("", {"OPENREG_DEVICE_COUNT": "3"}, arguments=MODULE)
    assert (done.code, done.err) == (0, "")
    for text in (
        "Devices: 3",
        "openreg:2  /openreg:2, made by 'simulated'",
        "0 started, at most ",
        "torch_openreg  ",
        "torch          2.13.",
        "OPENREG_DEVICE_COUNT = 3  (environment)",
        "OPENREG_POISON = 0  (default)",
        "openreg: simulated, priority 0, serves, makes /openreg:0, /openreg:1, /openreg:2",
    ):
        assert text in done.out, done.out
    assert "free of" in done.out


def test_a_rejected_setting_is_shown_as_such(run):
    done = run("", {"OPENREG_DEVICE_COUNT": "abc"}, arguments=MODULE)
    assert done.code == 0
    assert "Devices: 0" in done.out
    assert "(environment (rejected))" in done.out
    assert len(done.err.splitlines()) == 1


def test_a_plugin_that_does_not_load(run):
    done = run("", {"OPENREG_PLUGIN": "/nowhere/libnothing.so"}, arguments=MODULE)
    assert done.code == 0
    assert "Devices: none" in done.out
    assert "/nowhere/libnothing.so" in done.out
    assert "Settings" in done.out


def test_help(run):
    done = run("", arguments=(*MODULE, "--help"))
    assert done.code == 0 and "usage: python -m torch_openreg" in done.out
    assert sys.version_info >= (3, 10)
