"""How long something takes by how much of it there is, fitted to what was seen, of which the newest counts most."""

FORGETTING = 0.95  # what a sight weighs when the next one comes
LEAST_SPREAD = 0.05  # of the amounts, relative to their mean: below it a fixed part cannot be told from the rest


class FittedTime:
    """seconds = fixed + per_unit * amount, neither of them negative: least squares with forgetting."""

    def __init__(self) -> None:
        self._weight: float = 0.0
        self._x: float = 0.0  # weighted sums, of amounts x that took y seconds
        self._y: float = 0.0
        self._xx: float = 0.0
        self._xy: float = 0.0

    def __repr__(self) -> str:
        fixed_s, per_unit_s = self._line()
        return f"FittedTime(fixed_s={fixed_s:.3g}, per_unit_s={per_unit_s:.3g})" if self.is_known else "FittedTime()"

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    def note(self, amount: float, seconds: float) -> None:
        """So much of it took so long. Of nothing, nothing is learnt."""
        if amount <= 0:
            return
        self._weight = FORGETTING * self._weight + 1
        self._x = FORGETTING * self._x + amount
        self._y = FORGETTING * self._y + seconds
        self._xx = FORGETTING * self._xx + amount * amount
        self._xy = FORGETTING * self._xy + amount * seconds

    def seconds(self, amount: float) -> float | None:
        """How long so much would take; None: nothing was seen yet."""
        if not self.is_known:
            return None
        fixed_s, per_unit_s = self._line()
        return fixed_s + per_unit_s * amount if amount > 0 else 0.0

    def _line(self) -> tuple[float, float]:
        if not self.is_known:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        if spread > (LEAST_SPREAD * mean_x) ** 2:
            per_unit_s = (self._xy / self._weight - mean_x * mean_y) / spread
            fixed_s = mean_y - per_unit_s * mean_x
            if per_unit_s >= 0 and fixed_s >= 0:
                return fixed_s, per_unit_s
            if per_unit_s < 0:
                return mean_y, 0.0
        return 0.0, self._xy / self._xx
