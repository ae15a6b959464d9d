"""The ledger of one device: allocated bytes by category, and the high-water mark of each stretch of a run."""

from launcher.memory.prediction import CATEGORIES, Moment

_INDEX = {category: index for index, category in enumerate(CATEGORIES)}


class Ledger:
    """``begin`` opens a stretch; every change after it counts towards its high-water mark."""

    def __init__(self) -> None:
        self.items = [0] * len(CATEGORIES)
        self.total = 0
        self._moments: list[tuple[str, str, list[int]]] = []
        self._highest = -1
        self._snapshot = list(self.items)

    def begin(self, phase: str, where: str) -> None:
        """Start a stretch at what is allocated now."""
        self._highest = self.total
        self._snapshot = list(self.items)
        self._moments.append((phase, where, self._snapshot))

    def add(self, category: str, change_bytes: int) -> None:
        """Allocate, or free where negative."""
        index = _INDEX[category]
        self.items[index] += change_bytes
        self.total += change_bytes
        if self.total > self._highest:
            self._note()

    def run(self, category: str, peak_bytes: int, net_bytes: int) -> None:
        """Go up by at most ``peak_bytes``, and end at ``net_bytes``."""
        if self.total + peak_bytes > self._highest:
            index = _INDEX[category]
            self.items[index] += peak_bytes
            self.total += peak_bytes
            self._note()
            self.items[index] -= peak_bytes
            self.total -= peak_bytes
        if net_bytes:
            self.items[_INDEX[category]] += net_bytes
            self.total += net_bytes

    def spike(self, category: str, peak_bytes: int) -> None:
        """Allocate and free at once."""
        self.run(category, peak_bytes, 0)

    def move(self, source: str, target: str, moved_bytes: int) -> None:
        """Let bytes change their category."""
        self.items[_INDEX[source]] -= moved_bytes
        self.items[_INDEX[target]] += moved_bytes

    def held(self, category: str) -> int:
        """Bytes of one category now."""
        return self.items[_INDEX[category]]

    def timeline(self) -> tuple[Moment, ...]:
        """Give the high-water mark of each stretch so far."""
        return tuple(
            Moment(phase, where, {name: items[i] for name, i in _INDEX.items() if items[i]})
            for phase, where, items in self._moments
        )

    @property
    def peak_bytes(self) -> int:
        """The highest point of all stretches so far."""
        return max((sum(items) for _, _, items in self._moments), default=self.total)

    def _note(self) -> None:
        self._highest = self.total
        self._snapshot[:] = self.items
