"""Steps whose long sequences are shared by 1, 2, 4, ... ranks: degrees, groups, and plans."""

from lightning_thd.packing.sharing.degrees import Sharing, Waits, check_tiling
from lightning_thd.packing.sharing.groups import SharedBins, share_out

__all__ = ["SharedBins", "Sharing", "Waits", "check_tiling", "share_out"]
