"""Long curves are made readable, and short ones stay as they are."""

import pandas as pd
import pytest

from troll_lab.reports.curves import smooth, thin


@pytest.mark.parametrize("count", [1, 2, 3, 11])
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_short_curves_stay_as_they_are(count: int, columns: int) -> None:
    table = pd.DataFrame({seed: [seed + i / 10 for i in range(count)] for seed in range(columns)})
    table.index += 5
    pd.testing.assert_frame_equal(smooth(thin(table, 100)), table)
    pd.testing.assert_series_equal(smooth(thin(table[0], 100)), table[0])


def test_thin_takes_means_or_the_largest_of_each_group() -> None:
    curve = pd.Series([1.0, 2.0, 6.0, 4.0, 5.0], index=[10, 20, 30, 40, 50])
    assert thin(curve, 2).to_dict() == {20: 3.0, 50: 4.5}
    assert thin(curve, 2, largest=True).to_dict() == {20: 6.0, 50: 5.0}


def test_smooth_averages_a_window_that_is_cut_off_at_the_ends() -> None:
    curve = pd.Series([float(i) for i in range(12)])  # a window of five
    assert smooth(curve).tolist() == pytest.approx([1.0, 1.5, *range(2, 10), 9.5, 10.0])
