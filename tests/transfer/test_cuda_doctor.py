"""What `kvio doctor` says of GPUs, on the fake libcuda."""
import fake_cuda as fakes

from kvio import doctor


def test_gpus_and_their_ways_of_copying(fake_cuda):
    found = doctor._cuda()
    assert (found.name, found.state) == ("GPU", "ok") and not found.remedy
    assert "CUDA 13.0" in found.detail and "copies by loop, batch, strided" in found.detail
    assert found.detail.count("cuda:0 ") == found.detail.count("cuda:1 ") == 1
    assert fake_cuda.objects()["contexts"] == 0


def test_a_driver_without_a_gpu(fake_cuda):
    fake_cuda.set(devices=0)
    found = doctor._cuda()
    assert found.state == "limited" and "no GPU" in found.detail and "--gpus" in found.remedy
    assert not fake_cuda.calls("cuDevicePrimaryCtxRetain")


def test_a_gpu_that_cannot_be_opened(fake_cuda):
    fake_cuda.fail("cuDevicePrimaryCtxRetain", "OUT_OF_MEMORY")
    found = doctor._cuda()
    assert found.state == "limited" and "OUT_OF_MEMORY" in found.detail and found.remedy


def test_no_driver(monkeypatch):
    monkeypatch.delenv(fakes.VARIABLE, raising=False)
    monkeypatch.setattr(doctor, "_open", lambda name: (None, f"{name}: not found"))
    found = doctor._cuda()
    assert found.state == "missing" and "libcuda.so.1" in found.detail
    assert "host memory" in found.remedy


def test_a_library_that_is_no_libcuda(tmp_path, monkeypatch):
    """Not there, not a library, and a library of something else."""
    for name in "none.so", "text.so", "folder":
        monkeypatch.setenv(fakes.VARIABLE, str(tmp_path / name))
        (tmp_path / "text.so").write_text("no ELF")
        (tmp_path / "folder").mkdir(exist_ok=True)
        found = doctor._cuda()
        assert found.state == "missing" and name in found.remedy and "unset it" in found.remedy
    monkeypatch.setenv(fakes.VARIABLE, "libm.so.6")
    found = doctor._cuda()
    assert found.state == "limited" and "cuDriverGetVersion" in found.detail
    assert "unset it" in found.remedy
