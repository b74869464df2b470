"""NativeAccount: a grower's state in the structure of the C library."""

from ctypes import Array, addressof, c_double
from struct import Struct

from medusa_chat.decoding.backends.native.structs import Account
from medusa_chat.decoding.candidate_budget import PACE, Grower
from medusa_chat.decoding.draft_budget import SHARE

MOVED, MOVED_AT = Struct("dddqq"), Account.balance.offset  # the last five fields


class NativeAccount:
    """Hands a grower's account to C for a run of steps (`open`) and takes it back (`close`)."""

    def __init__(self) -> None:
        self.job = Account(share=SHARE, weight=PACE)
        self._grower: Grower | None = None  # the last one
        self._prices: tuple[float, ...] = ()  # that are set in the job
        self._kept: dict[tuple[float, ...], Array[c_double]] = {}  # prices -> their array in memory

    def open(self, grower: Grower, length: int, asks: bool) -> None:
        """Copy the grower's state to C. length: tokens in the cache; asks: see Plan. Unchanged
        fields are not written again."""
        grower.look_up(length)
        job = self.job
        if grower is not self._grower:
            self._grower, self._prices, self._kept = grower, (), {}
            job.least, job.sure, job.strict = grower.certain, grower.sure, grower.strict
            job.most, job.usual, job.proof = grower.most, grower.usual, grower.proof
            job.count = len(grower.prices)
        if grower.prices is not self._prices:
            self._prices = grower.prices
            job.prices = addressof(self._row(grower.prices))
            job.plain, job.enough, job.rate = grower.plain, grower.enough, grower.rate
        job.asks = asks
        moved = grower.balance, grower.credit, grower.pace, grower.certain_roots, grower.length
        MOVED.pack_into(job, MOVED_AT, *moved)

    def _row(self, prices: tuple[float, ...]) -> Array[c_double]:
        found = self._kept.get(prices)
        if found is None:
            found = self._kept[prices] = (c_double * len(prices))(*prices)
        return found

    def close(self, grower: Grower) -> None:
        """Copy the account back to the grower."""
        moved = MOVED.unpack_from(self.job, MOVED_AT)
        grower.balance, grower.credit, grower.pace, grower.certain_roots, grower.length = moved
