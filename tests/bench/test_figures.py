"""Percentiles, ratios, tables and reports, on figures that are known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from phonograph import PlanError
from phonograph.bench.figures import Spread, percentile, percentiles, ratio, rounded, speedup
from phonograph.bench.peers import join
from phonograph.bench.plots import draw
from phonograph.bench.report import Report, Row, Subject, command, read_report, write_json
from phonograph.bench.report_pages import fill, make_pages, reports_in
from phonograph.bench.tables import as_markdown, as_text, detail_table, main_table, markdown, printed

WHERE = {"accelerator": "a device", "python": "3.12", "torch": "2.11", "date": "a day", "command": "bench decode_step"}


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([1.0], 99, 1.0),
        ([3, 1, 2], 50, 2),
        (list(range(1, 101)), 95, 95),
        (list(range(1, 101)), 99, 99),
        ([1, 2], 0, 1),
    ],
)
def test_a_percentile_is_one_of_the_values(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_percentiles_of_nothing_are_nothing() -> None:
    assert percentiles([]) == {}
    assert percentiles([0.002, 0.004], 1e3) == {"p50": 2.0, "p95": 4.0, "p99": 4.0}


def test_speedups_say_how_many_times_better() -> None:
    assert speedup(5.0, 10.0, "lower") == 2.0
    assert speedup(200.0, 100.0, "higher") == 2.0
    assert ratio(1.0, 0.0) is None
    assert ratio(math.inf, 1.0) is None


def test_figures_are_rounded_to_digits_that_mean_something() -> None:
    assert [rounded(value) for value in (0.0, 1234567.8, 3.14159, 0.000123456)] == [0.0, 1234568, 3.142, 0.0001235]
    assert Spread.of([0.003, 0.001, 0.002], 1e3) == Spread(2.0, 1.0, 3.0)


def decode_report(folder: Path | None = None) -> Report:
    subject = Subject("decode_step", "A decode step", "ms", how="By events.")
    report = Report(subject, {"shape": "qwen3-8b"}, WHERE, folder)
    for num_seqs, floor, full, eager in ((1, 4.0, 5.0, 15.0), (32, 4.5, 6.0, 18.0)):
        for how, more in (("events", 0.0), ("slope", 0.5)):
            case: dict[str, int | str] = {"seqs": num_seqs, "by": how}
            report.add(Row(case, "full", "ours", full + more, {"wall_ms": full + 0.1, "kernels": {"one": 1}}))
            report.add(Row(case, "floor", "floor", floor))
            report.add(Row(case, "eager", "eager", eager))
    return report


def test_the_table_has_a_column_for_every_series_and_ratios() -> None:
    report = decode_report()
    join(report, {"vllm": {"decode_ms_bs1": 5.5, "decode_ms_bs8": 1.0, "W1_tok_s": 9.0}})
    head, first, slope, *_ = main_table(report)
    assert head[:2] == ["seqs", "by"]
    assert head[2:6] == ["floor, ms", "eager, ms", "full, ms", "vllm, ms"]
    assert head[6:] == ["full / floor", "eager / full", "vllm / full"]
    assert first == ["1", "events", "4", "15", "5", "", "1.25×", "3.00×", ""]
    assert slope == ["1", "slope", "4", "15", "5.5", "5.5", "1.38×", "2.73×", "1.00×"]


def test_a_rate_is_compared_the_other_way_round() -> None:
    report = Report(Subject("throughput", "Throughput", "tokens/s", "higher"), {}, WHERE, None)
    for series, kind, value in (("ceiling", "floor", 12_000.0), ("eager", "eager", 3_000.0), ("full", "ours", 9_000.0)):
        report.add(Row({"workload": "W1"}, series, kind, value))  # type: ignore[arg-type]
    join(report, {"vllm": {"W1_tok_s": 10_000.0}})
    head, line = main_table(report)
    assert head[-3:] == ["full / ceiling", "full / eager", "full / vllm"]
    assert line[-3:] == ["0.75×", "3.00×", "0.90×"]


def test_peers_join_where_the_method_is_the_same_and_only_once() -> None:
    report = decode_report()
    figures = {"vllm": {"decode_ms_bs32": 5.8}}
    join(report, figures)
    join(report, figures)
    assert [dict(row.case) for row in report.rows if row.kind == "peer"] == [{"seqs": 32, "by": "slope"}]


def test_tables_as_text_and_as_markdown() -> None:
    cells = [["seqs", "ms"], ["1", "5"], ["128", "8.25"]]
    assert as_text(cells) == "seqs    ms\n----  ----\n   1     5\n 128  8.25"
    assert as_markdown(cells) == "| seqs | ms |\n| --- | --- |\n| 1 | 5 |\n| 128 | 8.25 |"


def test_facts_of_several_parts_are_tables() -> None:
    report = decode_report()
    report.fact("profile", {"1": {"gap_us": 2.5, "top_kernels_us": {"gemm": 40.0}}, "32": {"gap_us": 3.0}})
    report.fact("one_break_us", {"empty": 1.1})
    report.fact("read_bandwidth_tb_s", 4.42)
    text = printed(report)
    assert "profile:\n\n    gap us\n" in text
    assert " 1     2.5\n32       3" in text
    assert "gemm     40\n" in text
    assert "read bandwidth tb s: 4.42" in text
    assert "| 1 | 2.5 |\n| 32 | 3 |" in markdown(report)


def test_the_details_leave_out_what_does_not_fit_in_a_cell() -> None:
    head, first, *_ = detail_table(decode_report())
    assert head == ["seqs", "by", "series", "wall ms"]
    assert first == ["1", "events", "full", "5.1"]
    assert "By events." in printed(decode_report())


def test_a_report_is_on_disk_as_soon_as_a_row_is_there(tmp_path: Path) -> None:
    report = decode_report(tmp_path)
    path = tmp_path / "decode_step.json"
    assert json.loads(path.read_text())["status"] == "running"
    report.note("a note")
    report.fact("read_bandwidth_tb_s", 4.42001)
    report.finish("complete")
    found = read_report(path)
    assert found is not None
    assert found.as_json() == report.as_json()
    assert found.facts == {"read_bandwidth_tb_s": 4.42}
    assert [child.name for child in tmp_path.iterdir()] == ["decode_step.json"]


def test_a_page_gets_its_tables_from_the_files(tmp_path: Path) -> None:
    decode_report(tmp_path).finish("complete")
    write_json(tmp_path / "peer_vllm.json", {"peer": "vllm", "figures": {"decode_ms_bs1": 5.5}})
    write_json(tmp_path / "other.json", {"figures": {}})
    page = tmp_path / "page.md"
    kept = "<!-- bench: prefill -->\nas it was\n<!-- end -->"
    page.write_text(f"# Page\n\n<!-- bench: decode_step -->\nold\n<!-- end -->\n\n{kept}\n")
    make_pages(tmp_path, page, None)
    text = page.read_text()
    assert "old" not in text
    assert "| 1 | slope | 4 | 15 | 5.5 | 5.5 | 1.38× | 2.73× | 1.00× |" in text
    assert "`bench decode_step`" in text
    assert kept in text
    assert fill(text, reports_in(tmp_path)) == text


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["HERE/bench/serve.py", "HERE/texts/a.txt", "--rounds", "2"], "python bench/serve.py texts/a.txt --rounds 2"),
        (["/usr/bin/phonograph", "bench", "--out", "/data/all/out/"], "phonograph bench --out out"),
        (["/data/src/phonograph/__main__.py", "bench", "--out=/data/out"], "phonograph bench --out=out"),
        (
            ["bench/x.py", '{"draft": "/a b/head", "n": 1}', "draft=/a/head"],
            'python bench/x.py {"draft": "head", "n": 1} draft=head',
        ),
        (
            ["bench/x.py", "http://host/v1", "org/model", "../up/x"],
            "python bench/x.py http://host/v1 org/model ../up/x",
        ),
    ],
)
def test_a_command_names_no_folder_of_its_machine(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [one.replace("HERE", str(tmp_path)) for one in argv])
    assert command() == said


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="has none"):
        make_pages(tmp_path, None, None)
    with pytest.raises(PlanError, match="is no folder"):
        make_pages(tmp_path / "nowhere", None, None)


def test_plots_of_sizes_and_of_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(decode_report(), tmp_path / "sizes.svg")
    named = Report(Subject("capture", "Capture", "s"), {}, WHERE, None)
    named.add(Row({"phase": "decode"}, "full", "ours", 1.0))
    draw(named, tmp_path / "names.png")
    assert "<svg" in (tmp_path / "sizes.svg").read_text()
    assert (tmp_path / "names.png").read_bytes().startswith(b"\x89PNG")
