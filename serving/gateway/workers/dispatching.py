"""Builds the control plane of one gateway from its configuration."""

from collections.abc import Sequence

from moonshard.serving.config.keys import RoutingConfig
from moonshard.serving.control.dispatch.dispatcher import Dispatcher, DispatchRules
from moonshard.serving.control.dispatch.prefill_place import PrefillRule
from moonshard.serving.control.members.fleet import Fleet
from moonshard.serving.control.routing.policies import policy_of
from moonshard.serving.control.routing.router import Router


def dispatcher_of(addresses: Sequence[str], routing: RoutingConfig) -> Dispatcher:
    """A dispatcher for workers at these addresses, none of which is there yet."""
    rules = DispatchRules(
        failover_wait_s=routing.failover_wait_s,
        ttft_slo_s=routing.ttft_slo_s,
        prefill=PrefillRule(
            kind=routing.local_prefill,
            max_left_tokens=routing.local_prefill_max_tokens,
            min_known_share=routing.local_prefill_min_known,
        ),
    )
    return Dispatcher(Fleet(addresses), Router(queue_weight=routing.queue_weight), rules, policy_of(routing.policy))
