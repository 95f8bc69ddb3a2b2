"""Which skills a stage's rows practise and how often, and how much each token of a row counts."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from moonshard.experiments.training.run.recipe import ANSWER_WEIGHT, RECIPES
from moonshard.experiments.training.texts import corpus
from moonshard.experiments.training.texts.conversation import TRAIN, Call, CallRound, Conversation, Exchange
from moonshard.experiments.training.texts.corpus import CONTEXT_WEIGHT, SKILLS, Skill, lesson, pocket_text

NUM_DRAWS = 2000


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what `corpus.draw` draws; the conversations themselves are not made."""
    counter: Counter[str] = Counter()

    def counting(name: str) -> Skill:
        def generate(random: Random, split: str, num_tokens: int) -> Conversation:
            counter[name] += 1
            return Conversation(exchanges=())

        skill = SKILLS[name]
        return Skill(generator=generate, share=skill.share, min_tokens=skill.min_tokens, max_tokens=skill.max_tokens)

    monkeypatch.setattr(corpus, "SKILLS", {name: counting(name) for name in SKILLS})
    return counter


def draw(num_tokens: int, shares: dict[str, float]) -> None:
    random = Random(0)
    for _ in range(NUM_DRAWS):
        corpus.draw(random, TRAIN, num_tokens, shares)


def test_a_stage_s_shares_go_before_those_of_the_skills(drawn: Counter[str]) -> None:
    draw(512, {"tools": 3.0, "talk": 1.0})
    assert set(drawn) == {"tools", "talk"}
    assert drawn["tools"] / NUM_DRAWS == pytest.approx(0.75, abs=0.04)


def test_without_shares_of_a_stage_the_skills_own_decide(drawn: Counter[str]) -> None:
    draw(512, {})
    total = sum(skill.share for skill in SKILLS.values())
    for name, skill in SKILLS.items():
        assert drawn[name] / NUM_DRAWS == pytest.approx(skill.share / total, abs=0.04)


def test_what_does_not_fit_is_not_drawn_whatever_its_share(drawn: Counter[str]) -> None:
    draw(128, {"tools": 0.9, "agents": 0.05, "talk": 0.05})
    assert set(drawn) == {"talk"}


@pytest.mark.parametrize("name", RECIPES)
def test_every_share_of_a_recipe_is_a_skill_s_and_fits_its_rows(name: str) -> None:
    for stage in RECIPES[name].stages:
        for skill, share in stage.shares:
            assert share > 0
            assert SKILLS[skill].min_tokens <= stage.num_tokens <= SKILLS[skill].max_tokens


def test_the_tokens_of_calls_weigh_what_the_stage_says_and_all_others_what_they_did() -> None:
    call = Call(name="exchange", arguments={"amount": 5})
    rounds = (CallRound(calls=(call, call), results=("7", "7")),)
    conversation = Conversation(exchanges=(Exchange(question="5 dollars?", answer="7 euros.", rounds=rounds),))
    text = pocket_text()
    ids, plain = lesson(text, conversation, 160)
    _, weights = lesson(text, conversation, 160, 4.0)
    of_calls = ids[1:][weights == 4.0].tolist()
    assert text.tokenizer.decode(of_calls) == 'functions.exchange:0{"amount": 5}functions.exchange:1{"amount": 5}'
    assert of_calls.count(text.tokenizer.special_tokens["<|tool_call_end|>"]) == 2
    assert set(plain[weights == 4.0]) == {np.float32(ANSWER_WEIGHT)}
    assert (plain[weights != 4.0] == weights[weights != 4.0]).all()
    assert set(plain.tolist()) == {0.0, np.float32(CONTEXT_WEIGHT), ANSWER_WEIGHT}
