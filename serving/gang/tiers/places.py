"""The places of a gang's partitions: the leader's own, and each follower's. Needs jax."""

from collections.abc import Sequence

from moonshard.kv.prefix import Spaces
from moonshard.kv.store.stack import TierStack
from moonshard.rpc import link_pb2
from moonshard.serving.engine.engine import Engine
from moonshard.serving.engine.loading.model import LoadedModel
from moonshard.serving.gang.leader import Follower, Gang
from moonshard.serving.gang.members import GangFault
from moonshard.serving.gang.tickets import tier_tickets
from moonshard.serving.gang.tiers.member import MemberTiers
from moonshard.serving.worker.store.places import OwnTiers, Place, PlacesOf, TierBlocks


def places_of(gang: Gang, stack: TierStack, model: LoadedModel) -> PlacesOf:
    """Once all members have loaded; `stack` is the leader's own. GangFault where a partition has no process that has
    all of it.
    """
    spaces = Spaces(model.shapes.num_partitions, gang.num_members)
    own = [partition for partition, owners in enumerate(model.held) if owners]
    if own != list(spaces.partitions_of(0)) or len(spaces.partitions_of(0)) * gang.num_members != len(model.held):
        raise GangFault(f"of {len(model.held)} partitions the leader of the gang has {own}")
    block = model.layout.groups[0].block

    def places(engine: Engine) -> Sequence[Place]:
        tickets = tier_tickets()

        def of(follower: Follower) -> MemberTiers:
            kinds = () if follower.ready is None else follower.ready.tiers

            def told() -> Sequence[link_pb2.KvTier]:
                return follower.tiers

            return MemberTiers(engine, follower.tier_orders, kinds, told=told, block=block, tickets=tickets)

        members: list[Place] = [OwnTiers(engine, TierBlocks(stack, block), tickets), *map(of, gang.followers)]
        return [members[spaces.process_of(partition)] for partition in range(spaces.num_partitions)]

    return places
