"""What is drawn and printed is what was given, in both themes; what cannot be drawn is refused."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_thd.report import page, picture, read_metrics, show, table
from lightning_thd.report.look import LOOKS, Theme, look_of, new_figure, short
from lightning_thd.report.packs import draw_packs, draw_work
from lightning_thd.report.page import PARTS, draw_page, draw_waterfall, step_times
from lightning_thd.report.terminal import Table, show_table

PACKS = [[3, 5, 2], [9], [4, 4]]
SERIES = {
    "train/loss": [(0, 5.5), (1, 3.0), (2, float("nan")), (3, 2.25)],
    "train/device/mfu": [(1, 0.5), (2, 0.25), (3, 0.75)],
    "train/packing/fill": [(0, 1.0)],
}


def bars(axes: Any) -> list[tuple[float, float]]:
    return [(bar.get_x(), bar.get_width()) for bar in axes.patches]


@pytest.mark.parametrize("theme", LOOKS)
def test_packs_lie_end_to_end(theme: Theme, tmp_path: Path) -> None:
    figure = draw_packs(PACKS, 10, theme=theme)
    expected = [(0, 10), (0, 3), (3, 5), (8, 2), (0, 10), (0, 9), (0, 10), (0, 4), (4, 4)]
    assert bars(figure.axes[0]) == expected
    assert figure.axes[0].get_title(loc="left") == "3 packs, 6 sequences, 90.0% filled"
    figure.savefig(tmp_path / "packs.png")
    assert (tmp_path / "packs.png").stat().st_size > 5_000


def test_what_another_sequence_holds_is_not_drawn() -> None:
    (axes,) = draw_packs([[6, 8, 6, 3], [5]], 12, held=[[0, 6, 6, 0], [0]]).axes
    assert bars(axes) == [(0, 12), (0, 6), (6, 2), (8, 0), (8, 3), (0, 12), (0, 5)]
    assert axes.get_title(loc="left") == "2 packs, 5 sequences, 66.7% filled, 42.9% shared"


def test_work_says_how_much_slower_the_slowest_rank_is() -> None:
    figure = draw_work([1.0, 3.0], [2.0, 2.0])
    said = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert said == ["as it comes: 1.50 x mean", "planned: 1.00 x mean"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draw_packs([[11]], 10), "A pack holds 11 tokens but capacity=10"),
        (lambda: draw_packs([], 0), "capacity=0; wanted the slots of a pack"),
        (lambda: draw_work([1.0], [1.0, 2.0]), "1 ranks before and 2 after"),
        (lambda: look_of("pink"), "theme='pink' is not one of 'light', 'dark'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_drawn(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_page_needs_no_other_file_and_says_the_numbers(tmp_path: Path) -> None:
    text = page(SERIES, tmp_path / "report.html", theme="dark").read_text()
    assert "<tr><td>MFU</td><td>50%</td><td>50%</td><td>75%</td></tr>" in text
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    assert LOOKS["dark"].paper in text
    assert "nan" not in re.sub(r"base64,[^\"]*", "", text)
    follows = page(SERIES, tmp_path / "report.html").read_text()
    assert all(look.paper in follows for look in LOOKS.values())
    conditions = re.findall(r'<source media="([^"]*)"', follows)
    phone, dark = "(max-width: 40rem)", "(prefers-color-scheme: dark)"
    assert conditions == [f"{phone} and {dark}", dark, phone], "the first that holds is shown"
    assert picture(SERIES, tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_what_repeats_is_left_out() -> None:
    mfu = SERIES["train/device/mfu"]
    one = {"train/device/mfu": mfu, "train/device/hfu": mfu, "train/packing/imbalance": [(1, 1.0), (2, 1.0)]}
    assert [row[0] for row in table(one).rows] == ["MFU"]
    several = {**one, "train/device/hfu": [(1, 0.75)], "train/packing/imbalance": [(1, 1.0), (2, 1.1)]}
    assert [row[0] for row in table(several).rows] == ["MFU", "HFU", "slowest rank / mean work"]


def test_a_loss_that_ended_as_nan_is_no_number_of_an_earlier_step() -> None:
    diverged = {"train/loss": [(0, 5.5), (1, 3.0), (2, math.nan)]}
    assert table(diverged).rows == [("loss", "5.5", "4.25", "nan")]
    never = {"train/loss": [(0, math.nan), (1, math.inf)], "train/device/mfu": [(1, 0.5)]}
    assert [row[-1] for row in table(never).rows] == ["inf", "50%"]
    assert "inf  loss, last" in draw_page(never, "light").get_suptitle()


def test_a_resumed_run_has_no_values_of_the_steps_that_it_repeated(tmp_path: Path) -> None:
    for age, (version, steps, loss) in enumerate([("a", (10, 20, 30, 40), 5.0), ("b", (25, 35), 3.0)]):
        logs = tmp_path / version / "metrics.csv"
        logs.parent.mkdir()
        logs.write_text("step,train/loss\n" + "".join(f"{step},{loss}\n" for step in steps))
        os.utime(logs, (age, age))
    assert read_metrics(tmp_path)["train/loss"] == [(10, 5.0), (20, 5.0), (25, 3.0), (35, 3.0)]


def test_logs_by_step_and_epoch_have_a_loss_and_logs_without_metrics_are_refused(tmp_path: Path) -> None:
    logs = tmp_path / "metrics.csv"
    logs.write_text("step,epoch,train/loss_step,train/loss_epoch\n0,0,5.5,\n1,0,3.0,\n1,0,,4.75\n")
    assert table(read_metrics(tmp_path)).rows == [("loss", "5.5", "4.25", "3")]
    logs.write_text("step,epoch,val/loss\n0,0,5.5\n")
    with pytest.raises(ValueError, match="have none of train/loss.*THDThroughputMonitor"):
        show(tmp_path)


def test_a_waterfall_ends_where_its_parts_add_up_to() -> None:
    seconds = dict(zip(PARTS, (0.1, 0.6, 0.2, 0.05, 0.05), strict=True))
    series = {f"train/step_time/{part}": [(10, value), (20, 3 * value)] for part, value in seconds.items()}
    assert list(step_times(series).values()) == pytest.approx([200, 1200, 400, 100, 100])
    axes = new_figure(5, 3, "light").add_subplot()
    draw_waterfall(axes, series)
    ends = [start + width for start, width in bars(axes)]
    assert [start for start, _ in bars(axes)] == pytest.approx([0, *ends[:-1]])
    assert ends[-1] == pytest.approx(2000)


def test_the_median_of_an_even_number_is_between_the_middle_two() -> None:
    assert table({"train/loss": [(0, 1.0), (1, 4.0)]}).rows == [("loss", "1", "2.5", "4")]


def test_headlines_are_inside_the_picture() -> None:
    names = ("train/loss", "train/device/real_items_per_sec", "train/device/mfu", "train/packing/fill")
    series = {name: [(0, 0.004217), (9, 0.9967)] for name in names}
    figure = draw_page({**series, names[1]: [(0, 117_589.0)]}, "light")
    figure.draw_without_rendering()
    assert figure._suptitle.get_window_extent().x1 < figure.bbox.x1


def test_the_picture_for_phones_has_one_column_and_no_line_wider_than_it() -> None:
    names = ("train/loss", "train/device/real_items_per_sec", "train/device/mfu", "train/packing/fill")
    figure = draw_page({name: [(0, 117_589.0), (9, 0.9967)] for name in names}, "light", columns=1)
    figure.draw_without_rendering()
    assert len({axes.get_position().x0 for axes in figure.axes}) == 1, "charts stand side by side"
    assert figure.get_suptitle().count("\n") == 3, "the four numbers do not have a line each"
    for text in (figure._suptitle, figure._supxlabel):
        assert text.get_window_extent().x1 < figure.bbox.x1, text.get_text()


def test_curves_are_inside_their_axes() -> None:
    series = {"train/loss": [(0, 1.0), (1, -3.0)], "train/packing/fill": [(0, 0.99)]}
    figure = draw_page(series, "light")
    loss, fill = figure.axes
    assert "-3  loss, last" in figure.get_suptitle()
    assert loss.get_ylim()[0] < -3  # preference losses may be below 0
    assert fill.lines[0].get_marker() == "o"  # a line of one point is none


def test_text_is_aligned_and_ticks_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("H200", "989.5", "a datasheet"), ("A", "-", "[none]")]
    show_table(Table(columns=("device", "bf16", "source"), rows=rows, text=(0, 2)))
    assert capsys.readouterr().out.splitlines() == [
        "device   bf16  source",
        "H200    989.5  a datasheet",
        "A           -  [none]",
    ]
    texts = {131072: "131.072k", 20_000: "20k", 2_500_000: "2.5M", 8_192: "8192", 0.25: "0.25", 0: "0"}
    assert {value: short(value) for value in texts} == texts


def test_event_files_of_tensorboard_are_read_where_there_is_no_table(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for folder, steps in (("a", (0, 1, 2)), ("b", (2, 3))):
        with SummaryWriter(str(tmp_path / folder)) as writer:
            for step in steps:
                writer.add_scalar("train/loss", 5.0 - step, step)
                writer.add_scalar("epoch", 0, step)
        (file,) = (tmp_path / folder).glob("*.tfevents.*")
        os.utime(file, (steps[0], steps[0]))
    series = read_metrics(tmp_path)
    assert series == {"train/loss": [(0, 5.0), (1, 4.0), (2, 3.0), (3, 2.0)]}
    show(tmp_path)
    (tmp_path / "metrics.csv").write_text("step,train/loss\n0,7.5\n")  # the same run, in more digits
    assert read_metrics(tmp_path) == {"train/loss": [(0, 7.5)]}


def test_a_dip_of_fill_is_explained_where_packs_are_full(tmp_path: Path) -> None:
    fill = {"train/packing/fill": [(step, 0.3 if step == 7 else 0.98) for step in range(20)]}
    dip = "Fill fell to 30.0% at step 7: the last packs of an epoch"
    assert dip in table(fill).foot
    assert dip in page(fill, tmp_path / "run.html").read_text()
    padded = {"train/packing/fill": [(step, 0.3 if step == 7 else 0.5) for step in range(20)]}
    even = {"train/packing/fill": [(step, 0.95) for step in range(20)]}
    assert table(padded).foot == table(even).foot == ""


def test_the_peak_that_mfu_is_a_share_of_is_below_the_table(tmp_path: Path) -> None:
    rates = {
        "train/device/tflops_per_gpu": [(5, 0.12), (9, 0.13)],
        "train/device/mfu": [(5, 0.375), (9, 0.4)],
    }
    assert str(table(rates)).endswith("MFU is the share of 0.3225 TFLOP/s, the peak of a device.")
    assert "0.3225 TFLOP/s" in page(rates, tmp_path / "run.html").read_text()
    unknown = {"train/device/tflops_per_gpu": [(5, 0.12)]}
    assert table(unknown).foot == ""
