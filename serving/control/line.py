"""How long something takes by how much of it there is: a line, fitted to what was seen.

Units are the caller's.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Line:
    """Time as a linear function of an amount, neither part below 0: least squares. Older observations weigh less."""

    memory: float  # what an observation still weighs after the next one
    weight: float = 0.0  # of all observations
    _x: float = 0.0  # weighted sums, of an amount x that took a time y
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def observe(self, amount: float, took: float) -> None:
        self.weight = self.weight * self.memory + 1
        self._x = self._x * self.memory + amount
        self._y = self._y * self.memory + took
        self._xx = self._xx * self.memory + amount * amount
        self._xy = self._xy * self.memory + amount * took

    def at(self, amount: float) -> float:
        """The time for so much; 0 before anything was seen."""
        fixed, each = self._fit()
        return fixed + each * amount

    def _fit(self) -> tuple[float, float]:
        """Where all observations have one amount nothing tells the two parts apart, and all of the time is taken to be
        in proportion.
        """
        if not self._xx:
            return (self._y / self.weight if self.weight else 0.0), 0.0
        spread = self.weight * self._xx - self._x * self._x
        if spread > 1e-9 * self.weight * self._xx:
            each = (self.weight * self._xy - self._x * self._y) / spread
            fixed = (self._y - each * self._x) / self.weight
            if each < 0:
                return self._y / self.weight, 0.0
            if fixed >= 0:
                return fixed, each
        return 0.0, self._xy / self._xx
