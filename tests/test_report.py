"""What `python -m dta_jax.report` draws of runs' metrics, and what it refuses."""

import json
import re

import numpy as np
import pytest

from dta_jax import report
from dta_jax.curves import MOST_POINTS, Scale, Series, tick_labels
from dta_jax.errors import InputError
from dta_jax.picture import compact, ticks


def write_run(folder, rows):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def made_rows(steps=30, **more):
    return [
        {
            "step": step,
            "loss": 1 / step,
            "seconds": 0.5,
            "reward_mean": step / steps,
            "flat_tokens": 1000,
            "tree_tokens": 100,
            "dedupe_ratio": 10.0,
            "note": "text is not drawn",
            "staleness_histogram": [1, 2],
        }
        | more
        for step in range(1, steps + 1)
    ]


def page_data(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))


def test_one_run_gives_a_page_and_a_picture_for_all_it_reports(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "run", made_rows(staleness_mean=1.5, staleness_max=3, peak_bytes=2**30))
    report.main([str(run), "--out", str(tmp_path / "out")])
    files = {path.name for path in (tmp_path / "out").iterdir()}
    drawn = {"reward", "loss", "throughput", "staleness", "memory", "dedupe", "seconds"}
    assert files == {"index.html"} | {f"{name}.{kind}" for name in drawn for kind in ("svg", "png")}
    page = (tmp_path / "out" / "index.html").read_text()
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!data:)", page)
    assert "<!--" not in page
    lines = {line["label"]: line for figure in page_data(page) for line in figure["lines"]}
    np.testing.assert_allclose(lines["loss"]["y"], [1 / step for step in range(1, 31)])
    np.testing.assert_allclose(lines["flat_tokens / seconds"]["y"], 2000)
    assert lines["peak_bytes"]["y"] == [2**30] * 30
    assert "note" not in lines
    said = capsys.readouterr().out
    assert "steps 30" in said
    assert "flat tokens/s 2,000" in said
    assert "reward, end 0.9667" in said  # mean of the last 3 of 30 steps


def test_runs_are_compared_by_colour_and_columns_by_dashes(tmp_path):
    runs = [
        report.read_run(write_run(tmp_path / "a", made_rows(10, staleness_mean=1, staleness_max=2))),
        report.read_run(write_run(tmp_path / "b", made_rows(20))),
    ]
    figures = {figure.name: figure for figure in report.FIGURES}
    loss = report.series_of(figures["loss"], runs)
    assert [one.label for one in loss] == [f"{run.name} loss" for run in runs]
    assert loss[0].colour != loss[1].colour
    assert [len(one.x) for one in loss] == [10, 20]
    rates = report.series_of(figures["throughput"], runs)
    assert [bool(one.dash) for one in rates] == [False, True, False, True]
    assert rates[0].colour == rates[1].colour != rates[2].colour
    staleness = report.series_of(figures["staleness"], runs)
    assert {one.label.split()[0] for one in staleness} == {runs[0].name}  # the other does not report it
    assert report.series_of(figures["memory"], runs) == []
    key = report.key_of(figures["throughput"], runs)
    assert [one.label for one in key[:2]] == [run.name for run in runs]
    assert [one.dash for one in key[2:]] == [one.dash for one in rates[:2]]
    assert report.key_of(figures["loss"], runs[:1]) == []
    report.write_report(runs, tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "2 runs" in page
    assert all(page.count(run.name) >= 2 for run in runs)


def test_a_column_may_be_missing_in_some_steps(tmp_path):
    rows = made_rows(5)
    del rows[1]["loss"]
    rows[3]["loss"] = None
    run = report.read_run(write_run(tmp_path / "run", rows))
    (loss,) = report.series_of(next(f for f in report.FIGURES if f.name == "loss"), [run])
    assert loss.x.tolist() == [1, 3, 5]


def test_a_row_that_was_cut_off_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", made_rows(3))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert report.read_run(run / "metrics.jsonl").steps.tolist() == [1, 2, 3]


def test_running_means_are_means_of_neighbours():
    y = np.arange(120.0) ** 2
    smooth = Series("a", np.arange(120.0), y, "#000000").smoothed()  # 120 points: two on either side
    assert smooth[50] == pytest.approx(y[48:53].mean())
    assert smooth[0] == pytest.approx(y[:3].mean())


def test_long_runs_are_thinned_to_means():
    x = np.arange(10_000.0)
    thin_x, thin_y = Series("a", x, 2 * x, "#000000").thinned()
    assert len(thin_x) == MOST_POINTS
    np.testing.assert_allclose(thin_y, 2 * thin_x)
    assert thin_y.mean() == pytest.approx((2 * x).mean(), rel=1e-3)


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [-1e-5, 2e-5], [1e9, 3e9], [1000.1, 1000.4]])
def test_charts_have_room_and_labels_that_differ(values):
    y = np.array(values)
    scale = Scale.of([Series("a", np.arange(len(y)) + 1.0, y, "#000000")])
    assert scale.y0 <= y.min() <= y.max() < scale.y1
    marks = ticks(scale.y0, scale.y1, 5)
    assert 2 <= len(marks) <= 7
    assert scale.y0 - 1e-9 <= marks[0]
    assert marks[-1] <= scale.y1 * (1 + 1e-9)
    assert len(set(tick_labels(marks))) == len(marks)


def test_numbers_are_short():
    assert [compact(n) for n in (0, 0.00012345, 999, 14198, 2.5e6, 3e9)] == [
        "0", "0.000123", "999", "14.2k", "2.5M", "3G",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rows: expected at least one step; got none"),
        ('{"step": 1}\n{"step": 2\n', "line 2: expected a JSON object; got "),
        ('{"step": 1}\n[2]\n', "line 2: expected a JSON object with a step; got [2]"),
        ('{"step": 2}\n{"step": 2}\n', "line 2: expected a step after 2; got 2"),
        (
            '{"step": 1, "loss": 1}\n{"step": 2, "loss": "x"}\n',
            "line 2: loss: expected a finite number; got 'x'",
        ),
        ('{"step": 1, "loss": NaN}\n', "line 1: loss: expected a finite number; got nan"),
    ],
)
def test_bad_files_are_one_line_that_names_theirs(tmp_path, text, message):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(InputError) as error:
        report.main([str(tmp_path), "--out", str(tmp_path / "out")])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_missing_runs_and_taken_folders_are_one_line(tmp_path):
    with pytest.raises(InputError, match=r"absent/metrics\.jsonl: file: expected one JSON object per line"):
        report.main([str(tmp_path / "absent"), "--out", str(tmp_path / "out")])
    run = write_run(tmp_path / "run", made_rows(2))
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match="taken: expected a folder to write to"):
        report.main([str(run), "--out", str(tmp_path / "taken")])


def test_names_of_runs_are_escaped(tmp_path):
    run = report.read_run(write_run(tmp_path / "<b>bold", made_rows(2)))
    report.write_report([run], tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<b>bold" not in page
    assert "&lt;b&gt;bold" in page
