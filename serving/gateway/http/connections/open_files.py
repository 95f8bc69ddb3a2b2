"""How many files this process may have open: each connection is one, and many shells allow 1,024.

Beyond that nobody gets a connection any more, whatever gives way, so that the limits of `waiting` would protect
nothing.
"""

import logging
import resource

OTHER_FILES = 2048  # connections whose requests are answered, those to workers, files

logger = logging.getLogger(__name__)


def allow_connections(num_waiting: int) -> None:
    """Raises the limit of open files for so many waiting connections and all others; warns where the system allows
    fewer.
    """
    wanted = num_waiting + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _reaches(soft, wanted):
        return
    allowed = wanted if _reaches(hard, wanted) else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning(
            "this process may open %d files (ulimit -n), %d too few for gateway.max_idle_connections and "
            "gateway.max_half_open_connections",
            *(allowed, wanted - allowed),
        )


def _reaches(limit: int, wanted: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= wanted
