"""The GPU suite on a machine without a GPU: what it refuses, records, skips and sums up."""

import json

import pytest

from dta_jax import bench, gpu_suite
from dta_jax.errors import InputError, RunError
from dta_jax.gpu_cases import FULL, QUICK, TINY, case_names, run_case

pytestmark = pytest.mark.optimized

TINY_SUITE = ("--suite", "gpu", "--quick", "--any-device")


def stored(folder):
    return json.loads((folder / "gpu.json").read_text())


def figures(name, scale, rollouts):
    """In place of a measurement."""
    if name == "correct/tree":
        raise RunError("errors above the bound")
    rate = {"flops_per_second": 8.0 if name == "rate/matmul" else 2.0}
    return {"seconds": 4.0 if name.endswith("branch") else 1.0, "forward": rate, "backward": rate} | rate


def test_real_cases_are_measured_and_what_is_not_there_is_said(tmp_path):
    for pattern in ("attention/cudnn", "methods/tiny/packed"):
        bench.main([*TINY_SUITE, "--out", str(tmp_path), "--cases", pattern])
    cases = stored(tmp_path)["cases"]
    assert cases["attention/cudnn"]["status"] == "not available"
    assert cases["methods/tiny/packed"]["figures"]["flops_per_second"] > 0
    assert {"jax", "jaxlib", "driver", "platform_version", "commit"} <= set(cases["methods/tiny/packed"])


def test_a_failure_is_recorded_and_a_second_call_measures_nothing(tmp_path, monkeypatch, capsys):
    asked = []

    def run(name, scale, rollouts):
        asked.append(name)
        return figures(name, scale, rollouts)

    monkeypatch.setattr(gpu_suite, "run_case", run)
    bench.main([*TINY_SUITE, "--out", str(tmp_path)])
    cases = stored(tmp_path)["cases"]
    assert list(cases) == asked == list(case_names(TINY))
    assert (cases["correct/tree"]["status"], cases["correct/tree"]["reason"]) == (
        "failed", "errors above the bound",
    )  # fmt: skip
    assert {case["status"] for name, case in cases.items() if name != "correct/tree"} == {"done"}
    bench.main([*TINY_SUITE, "--out", str(tmp_path)])
    assert len(asked) == len(cases)
    assert "all in" in capsys.readouterr().out


def test_no_case_is_started_after_the_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_suite, "run_case", figures)
    bench.main([*TINY_SUITE, "--out", str(tmp_path), "--minutes", "1e-12"])
    assert not (tmp_path / "gpu.json").exists()
    assert "cases left: run the same command again" in capsys.readouterr().out


def test_the_summary_has_rates_over_what_they_are_measured_against():
    names = (
        "rate/matmul",
        "attention/pallas",
        "attention/cudnn",
        "back/m/16",
        "methods/m/branch",
        "methods/m/packed",
    )
    found = gpu_suite.summary({n: {"status": "done", "figures": figures(n, None, None)} for n in names})
    assert found["back/m/16 MFU"] == 0.25
    assert found["methods/m/packed, times as fast as branch"] == 4
    assert found["attention/pallas backward, rate over cuDNN's"] == 1
    assert not gpu_suite.summary({"rate/matmul": {"status": "failed", "reason": ""}})


def test_errors_above_the_bound_fail_a_case(monkeypatch):
    assert max(run_case("correct/kernels/float32", TINY, None)["errors"].values()) < 1e-4
    monkeypatch.setattr("dta_jax.gpu_cases.KERNEL_BOUNDS", {"float32": 0.0})
    with pytest.raises(RunError, match="above 0"):
        run_case("correct/kernels/float32", TINY, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--suite", "gpu"), "an NVIDIA GPU; got cpu"),
        (("--suite", "gpu", "--any-device"), "--quick beside it"),
        ((*TINY_SUITE, "--cases", "no/such"), "no/such"),
        ((*TINY_SUITE, "--minutes", "0"), "above 0"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(arguments, said, tmp_path):
    with pytest.raises(InputError, match=said):
        bench.main([*arguments, "--out", str(tmp_path)])


def test_results_of_another_scale_are_not_mixed(tmp_path):
    (tmp_path / "gpu.json").write_text(json.dumps({"scale": "full", "device": "cpu", "cases": {}}))
    with pytest.raises(InputError, match="another --out"):
        bench.main([*TINY_SUITE, "--out", str(tmp_path)])


def test_the_quick_suite_is_a_part_of_the_full_one():
    assert set(case_names(QUICK)) < set(case_names(FULL))
