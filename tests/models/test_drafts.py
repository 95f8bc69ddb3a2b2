"""Drafts against recorded references, and the laws of their rows: pages, padding, chains, tables."""

from pathlib import Path

import numpy as np
import pytest

from tests.agreement import FIXTURES, LOGIT_TOLERANCE
from tests.models.drafts import loaded_draft, recorded, shifted, target_features, with_mtp

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
EAGLE = FIXTURES / "kimi_k2_eagle3"


def eagle_input(prompt: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that follow, and features, from our own forward pass."""
    ref = recorded("kimi_k2_eagle3", "ref_eagle3.npz")
    ids = ref[f"ids{prompt}"]
    return shifted(ids.tolist(), int(ref[f"first{prompt}"])), target_features(tuple(ids.tolist()), (1, 2, 3))


def eagle_draft(tmp_path: Path):
    """The fixture's draft with the taps that its reference was recorded with."""
    return loaded_draft(with_taps(tmp_path / "draft", [0, 1, 2]))


def with_taps(folder: Path, ids: list[int]) -> Path:
    import json
    import shutil

    shutil.copytree(EAGLE, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": ids}))
    return folder


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_a_chain_has_the_reference_s_tokens_and_logits(prompt, tmp_path):
    ref = recorded("kimi_k2_eagle3", "ref_eagle3.npz")
    drafting = eagle_draft(tmp_path)
    following, features = eagle_input(prompt)
    hidden = drafting.extend(following, features)[-1]
    last = len(following) - 1
    np.testing.assert_array_equal(drafting.chain(hidden, last, 3), ref[f"draft{prompt}"])
    for ahead, token in enumerate(ref[f"draft{prompt}"]):
        np.testing.assert_allclose(drafting.logits(hidden)[0], ref[f"draft_logits{prompt}"][ahead], atol=LOGIT_TOLERANCE)
        hidden = drafting.step(int(token), hidden, last + 1 + ahead)


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_multi_token_prediction_has_the_hidden_states_and_logits_of_hugging_face(prompt, tmp_path):
    ref = recorded("kimi_k2_mtp", "ref_mtp.npz")
    drafting = loaded_draft(None, with_mtp(tmp_path / "target"))
    ids = ref[f"ids{prompt}"].tolist()
    following = shifted(ids, int(ref[f"greedy{prompt}"][0]))
    hidden = drafting.extend(following, target_features(tuple(ids), ()))
    np.testing.assert_allclose(hidden, ref[f"mtp_hidden{prompt}"], atol=LOGIT_TOLERANCE)
    np.testing.assert_allclose(drafting.logits(hidden[-2:]), ref[f"mtp_logits{prompt}"], atol=LOGIT_TOLERANCE)
