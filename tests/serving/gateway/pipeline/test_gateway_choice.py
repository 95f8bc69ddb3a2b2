"""Steps that carry several tokens at once, as drafts will."""

from moonshard.models.tokenizers.tokenizer import load_tokenizer
from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.link_pb2 import SequenceOutput
from moonshard.serving.chat.detokenizer import Detokenizer
from moonshard.serving.gateway.pipeline.choice import ChoiceStream
from tests.serving.gateway.conftest import FIXTURE

TOKENIZER = load_tokenizer(FIXTURE)
assert TOKENIZER is not None
LETTERS = [TOKENIZER.encode(letter)[0] for letter in "abcdef"]
LOGPROBS = [pb.PositionLogprobs(chosen=pb.TokenLogprob(token_id=token)) for token in LETTERS]


def choice(*stop: str) -> ChoiceStream:
    assert TOKENIZER is not None
    return ChoiceStream(0, Detokenizer(TOKENIZER, stop=stop))


def test_tokens_after_a_stop_string_in_the_same_step_do_not_count():
    delta = choice("cd").accept(SequenceOutput(token_ids=LETTERS, logprobs=LOGPROBS))
    assert delta is not None
    assert (delta.text, delta.stop_string, delta.finish_reason) == ("ab", "cd", pb.FINISH_REASON_STOP)
    assert list(delta.token_ids) == LETTERS[:4]
    assert len(delta.logprobs) == 4


def test_a_stop_string_before_the_workers_own_stop_token_wins():
    output = SequenceOutput(token_ids=LETTERS, finish_reason=pb.FINISH_REASON_STOP)
    delta = choice("b").accept(output)
    assert delta is not None
    assert (delta.text, delta.stop_string, list(delta.token_ids)) == ("a", "b", LETTERS[:2])
    assert not delta.HasField("stop_token_id")


def test_a_stop_token_flushes_what_might_have_become_a_stop_string():
    output = SequenceOutput(token_ids=LETTERS[:3], finish_reason=pb.FINISH_REASON_STOP)
    delta = choice("bx").accept(output)
    assert delta is not None
    assert (delta.text, delta.stop_token_id) == ("ab", LETTERS[2])


def test_after_its_end_a_choice_says_nothing_and_knows_when_the_worker_is_done():
    ended = choice("a")
    ended.accept(SequenceOutput(token_ids=LETTERS[:1]))
    assert ended.accept(SequenceOutput(token_ids=LETTERS[1:2])) is None
    assert not ended.is_worker_done
    assert ended.accept(SequenceOutput(token_ids=LETTERS[2:3], finish_reason=pb.FINISH_REASON_LENGTH)) is None
    assert ended.is_worker_done


def test_a_choice_keeps_the_tokens_whose_text_is_held_back():
    held = choice("abx")
    held.accept(SequenceOutput(token_ids=LETTERS[:1]))
    delta = held.accept(SequenceOutput(token_ids=LETTERS[1:2]))
    assert delta is not None
    assert (delta.text, held.token_ids) == ("", LETTERS[:2])


def test_an_id_that_only_the_model_has_gives_no_text():
    delta = choice("zz").accept(SequenceOutput(token_ids=[LETTERS[0], 1_000_000, LETTERS[1]]))
    assert delta is not None
    assert (delta.text, len(delta.token_ids)) == ("ab", 3)
