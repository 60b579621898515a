"""What the store must read to sort arriving reports: little, however much their ranks have stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlalchemy import BigInteger, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from bucketplan_server.beside import beside_now
from bucketplan_server.store.arrivals import (
    Arrival,
    Known,
    Lists,
    Name,
    crowded_ranks,
    stored_lists,
    wanted_lists,
)
from bucketplan_server.store.pieces import pieces
from bucketplan_server.store.tables import reports

__all__ = ["known_of"]

_NAMES_PER_QUERY = 500
_RANKS_PER_QUERY = 200
_DECODED_AT_ONCE_BYTES = 2**20
_LENGTH = func.length(reports.c.report, type_=BigInteger)


async def known_of(connection: AsyncConnection, job: str, attempt: int, arrived: Sequence[Arrival]) -> Known:
    """What `sort_arrivals` needs of the store, holding no more bytes of reports at once than arrive, or 1 MiB.

    One report alone may be larger than that.
    """
    reading = _Reading(connection, job, attempt)
    same = await reading.repeated(arrived)
    counts, sizes = await reading.totals(sorted({arrival.report.rank for arrival in arrived}))
    # A repeated report adds no list, so that a call that is sent again reads none.
    new = [one for one in arrived if (one.report.rank, one.report.slot, one.report.ordinal) not in same]
    wanted = wanted_lists(new, crowded_ranks(counts, arrived) & counts.keys())
    lists = {rank: await reading.lists(rank, of_rank) for rank, of_rank in wanted.items()}
    return Known(same, counts, sizes, lists)


class _Reading:
    """Reads of one attempt's reports on one connection."""

    def __init__(self, connection: AsyncConnection, job: str, attempt: int) -> None:
        self._connection = connection
        self._of_attempt = (reports.c.job == job, reports.c.attempt == attempt)

    async def repeated(self, arrived: Sequence[Arrival]) -> dict[Name, bytes | None]:
        """What is stored under the names that arrive, None where it has another length and so is another report."""
        lengths: dict[Name, set[int]] = {}
        for report, encoded in arrived:
            lengths.setdefault((report.rank, report.slot, report.ordinal), set()).add(len(encoded))
        column = (reports.c.rank, reports.c.slot, reports.c.ordinal)
        found: dict[Name, bytes | None] = {}
        for names in pieces(sorted(lengths), _NAMES_PER_QUERY):
            is_named = (*self._of_attempt, tuple_(*column).in_(names))
            rows = await self._connection.execute(select(*column, _LENGTH).where(*is_named))
            stored = {(rank, slot, ordinal): length for rank, slot, ordinal, length in rows}
            found |= dict.fromkeys(stored)
            equal = [name for name, length in stored.items() if length in lengths[name]]
            if equal:
                query = select(*column, reports.c.report).where(*self._of_attempt, tuple_(*column).in_(equal))
                for rank, slot, ordinal, report in await self._connection.execute(query):
                    found[rank, slot, ordinal] = report
        return found

    async def totals(self, ranks: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
        """How many reports each of these ranks that has any stored, and their bytes."""
        query = select(reports.c.rank, func.count(), func.sum(_LENGTH)).where(*self._of_attempt)
        counts: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for part in pieces(ranks, _RANKS_PER_QUERY):
            rows = await self._connection.execute(query.where(reports.c.rank.in_(part)).group_by(reports.c.rank))
            for rank, number, size in rows:
                counts[rank], sizes[rank] = int(number), int(size)
        return counts, sizes

    async def lists(self, rank: int, wanted: Lists) -> Lists:
        """The lists of members that `rank` has stored in the roles of `wanted`.

        Reads on only until all of `wanted` is found, which is then taken: a rank reports the same group again and
        again, so the first piece is enough in nearly every case.
        """
        of_rank = (*self._of_attempt, reports.c.rank == rank)
        query = select(reports.c.slot, reports.c.ordinal, _LENGTH.label("length")).where(*of_rank)
        rows = (await self._connection.execute(query.order_by(reports.c.slot, reports.c.ordinal))).all()
        found: Lists = {role: set() for role in wanted}
        for names in _decodable([((row.slot, row.ordinal), row.length) for row in rows]):
            is_named = tuple_(reports.c.slot, reports.c.ordinal).in_(names)
            read = await self._connection.execute(select(reports.c.report).where(*of_rank, is_named))
            for role, lists in (await beside_now(True, stored_lists, read.scalars().all(), wanted.keys())).items():
                found[role] |= lists
            if all(lists <= found[role] for role, lists in wanted.items()):
                break
        return found


def _decodable(sized: Sequence[tuple[tuple[str, int], int]]) -> Iterator[list[tuple[str, int]]]:
    """Names of reports, as many as have bytes to be decoded at once, at least one."""
    piece: list[tuple[str, int]] = []
    size = 0
    for name, length in sized:
        if piece and (size + length > _DECODED_AT_ONCE_BYTES or len(piece) == _NAMES_PER_QUERY):
            yield piece
            piece, size = [], 0
        piece.append(name)
        size += length
    if piece:
        yield piece
