"""A format's stored tensors stand for exactly the values that numpy, and whoever wrote the samples, makes of them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.models.formats.format import Format
from moonshard.models.formats.fp8 import E4M3, FP8
from moonshard.models.formats.int4 import INT4
from moonshard.models.formats.known import FORMATS
from moonshard.models.formats.quantised import Quantised

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
SAMPLES = np.load(Path(__file__).parents[2] / "fixtures/formats/samples.npz")
SMALLEST_NORMAL = 2.0**-126
shapes = st.tuples(st.integers(1, 300), st.integers(1, 300))
exponents = st.sampled_from([-130, -60, -3, 0, 60, 119])


def widened(format: Format, values: np.ndarray, scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    held = Quantised(jnp.asarray(values), jnp.asarray(scales), format.name, format.block(shape[1]), shape[1])
    assert held.shape == shape
    return np.asarray(jax.jit(lambda weight: weight.widened(jnp.float32))(held))


def by_hand(name: str, values: np.ndarray, scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Value by value, as the formats' authors describe them, of nothing that is tested."""
    found = np.zeros(shape, np.float32)
    rows, columns = {"int4": (1, 32), "fp8": (128, 128), "int8": (1, shape[1])}[name]
    for row in range(shape[0]):
        if name == "int4":
            words = [int(word) % 2**32 for word in values[row]]
            codes = np.array([(words[i // 8] // 16 ** (i % 8)) % 16 - 8 for i in range(shape[1])], np.float32)
        else:
            codes = values[row].astype(np.float32)
        own = np.array([scales[row // rows, i // columns] for i in range(shape[1])], np.float32)
        with np.errstate(over="ignore"):
            found[row] = codes * own
            if name == "int4":
                found[row] = found[row].astype(ml_dtypes.bfloat16)
    return found


def stored(name: str, shape: tuple[int, int], exponent: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tensors of the format, drawn without it."""
    random = np.random.default_rng(seed)
    if name == "int4":
        values = random.integers(-(2**31), 2**31, (shape[0], -(-shape[1] // 8)), np.int32)
        scales = np.exp2(random.uniform(exponent, exponent + 3, (shape[0], -(-shape[1] // 32))))
        return values, scales.astype(ml_dtypes.bfloat16)
    if name == "fp8":
        codes = random.integers(0, 127, shape, np.uint8) | random.integers(0, 2, shape, np.uint8) << 7
        blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
        return codes.view(E4M3), np.exp2(random.uniform(exponent, exponent + 3, blocks)).astype(np.float32)
    codes = random.integers(-127, 128, shape, np.int8)
    return codes, np.exp2(random.uniform(exponent, exponent + 3, (shape[0], 1))).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40)
@given(shape=shapes, exponent=exponents, seed=st.integers(0, 2**32))
def test_stored_tensors_stand_for_code_times_scale(name: str, shape: tuple[int, int], exponent: int, seed: int):
    format, (values, scales) = FORMATS[name], stored(name, shape, exponent, seed)
    assert (values.shape, scales.shape) == (format.stored_shape(shape), format.scales_shape(shape))
    found = format.dequantise(values, scales, shape[1])
    assert found.dtype == format.value_dtype
    np.testing.assert_array_equal(found.astype(np.float32), by_hand(name, values, scales, shape))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("exponent", [-130, -60, 0, 119])
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (5, 64), (130, 129), (200, 300), (128, 256)])
def test_jax_widens_to_the_values_of_numpy(name: str, exponent: int, shape: tuple[int, int]):
    """But for what XLA may flush to zero."""
    values, scales = stored(name, shape, exponent, seed=sum(shape))
    expected = by_hand(name, values, scales, shape)
    found = widened(FORMATS[name], values, scales, shape)
    is_small = (np.abs(expected) < SMALLEST_NORMAL) | (np.abs(scales).astype(np.float32).max() < SMALLEST_NORMAL)
    np.testing.assert_array_equal(found[~is_small], expected[~is_small])
    assert (np.abs(found[is_small]) <= np.abs(expected[is_small])).all()


def test_a_weight_is_widened_to_bfloat16_with_one_rounding():
    values, scales = stored("fp8", (130, 70), 0, seed=1)
    held = Quantised(jnp.asarray(values), jnp.asarray(scales), "fp8", (128, 128), 70)
    expected = by_hand("fp8", values, scales, (130, 70)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(jax.jit(lambda weight: weight.widened(jnp.bfloat16))(held), expected)


def test_every_fp8_code_is_its_value_and_the_two_that_are_none_are_found():
    codes = np.arange(256, dtype=np.uint8)[None]
    ones = np.ones((1, 2), np.float32)
    is_nan = codes & 127 == 127
    for part in codes.T[:, None]:
        fault = FP8.fault_of_values(part.view(E4M3))
        assert fault == ("has a value that is not a number" if part[0, 0] % 128 == 127 else None)
    sign, exponent, mantissa = codes >> 7, (codes >> 3 & 15).astype(int), codes & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * np.exp2(exponent - 7.0))
    expected = np.where(sign == 1, -magnitude, magnitude).astype(np.float32)
    for found in (FP8.dequantise(codes.view(E4M3), ones, 256), widened(FP8, codes.view(E4M3), ones, (1, 256))):
        np.testing.assert_array_equal(found[~is_nan], expected[~is_nan])


def test_every_nibble_is_its_value_wherever_it_lies_in_a_word():
    nibbles = np.arange(128) // 8 % 16
    words = (nibbles[np.arange(128).reshape(16, 8)] * 16 ** np.arange(8)).sum(axis=1).astype(np.uint32).view(np.int32)
    scales = np.ones((1, 4), ml_dtypes.bfloat16)
    for found in (INT4.dequantise(words[None], scales, 128), widened(INT4, words[None], scales, (1, 128))):
        np.testing.assert_array_equal(found[0].astype(np.float32), nibbles - 8)


@pytest.mark.parametrize("name", SAMPLES["names"])
def test_the_samples_dequantise_bit_for_bit_as_their_authors_have_them(name: str):
    """INT4 by compressed-tensors' own decompression; FP8 by torch, each block divided by its largest value / 448."""
    expected = SAMPLES[f"{name}.dequant"]
    if f"{name}.weight_packed" in SAMPLES:
        format, values = INT4, SAMPLES[f"{name}.weight_packed"]
        scales = SAMPLES[f"{name}.weight_scale"].view(ml_dtypes.bfloat16)
    else:
        format, values = FP8, SAMPLES[f"{name}.weight"].view(E4M3)
        scales = SAMPLES[f"{name}.weight_scale_inv"]
    assert values.shape == format.stored_shape(expected.shape)
    np.testing.assert_array_equal(format.dequantise(values, scales, expected.shape[1]).astype(np.float32), expected)
    np.testing.assert_array_equal(widened(format, values, scales, expected.shape), expected)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40)
@given(shape=shapes, exponent=exponents, seed=st.integers(0, 2**32))
def test_a_matrix_is_quantised_to_within_half_a_step(name: str, shape: tuple[int, int], exponent: int, seed: int):
    format = FORMATS[name]
    matrix = (np.random.default_rng(seed).standard_normal(shape) * 2.0**exponent).astype(np.float32)
    values, scales = format.quantise(matrix)
    assert (values.dtype, scales.dtype) == (format.values.dtype, format.scales.dtype)
    assert (values.shape, scales.shape) == (format.stored_shape(shape), format.scales_shape(shape))
    assert format.fault_of_values(values) is format.fault_of_scales(scales) is None
    if exponent == -130:  # the scales themselves are no normal numbers: there is hardly a digit in them
        return
    rows, columns = format.block(shape[1])
    found = format.dequantise(values, scales, shape[1]).astype(np.float32)
    for row in range(0, shape[0], rows):
        for column in range(0, shape[1], columns):
            part = np.s_[row : row + rows, column : column + columns]
            largest = np.abs(matrix[part]).max()
            step = {"int4": 1 / 7.5, "fp8": 32 / 448, "int8": 1 / 127}[name] * largest  # fp8's steps grow with codes
            # With 7.5 steps up to the largest magnitude and codes up to 7, that one is half a step away; besides,
            # scale and result are rounded to 8 bits.
            assert np.abs(found[part] - matrix[part]).max() <= step * 0.5001 + (largest / 128 if name == "int4" else 0)


@pytest.mark.parametrize(("name", "largest"), [("fp8", 448), ("int8", 127)])
def test_codes_are_found_again_from_their_values(name: str, largest: int):
    """Where each block has the largest code, from which its scale is made. INT4's scale is no code's value."""
    shape, format = (131, 259), FORMATS[name]
    values, scales = stored(name, shape, 0, seed=3)
    for row in range(0, shape[0], format.rows):
        values[row, :: format.block(shape[1])[1]] = largest
    again, _ = format.quantise(format.dequantise(values, scales, shape[1]))
    np.testing.assert_array_equal(again.astype(np.float32), values.astype(np.float32))


def test_zeros_have_a_scale_that_is_served():
    for format in FORMATS.values():
        values, scales = format.quantise(np.zeros((3, 40), np.float32))
        assert format.fault_of_values(values) is format.fault_of_scales(scales) is None
        np.testing.assert_array_equal(format.dequantise(values, scales, 40), 0)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_no_format_has_is_not_quantised(value: float):
    for format in FORMATS.values():
        with pytest.raises(ValueError, match="infinite or not a number"):
            format.quantise(np.array([[1, value]], np.float32))


@pytest.mark.parametrize(
    ("value", "named"), [(0, "zero"), (np.inf, "infinite"), (-np.inf, "infinite"), (np.nan, "not a number")]
)
def test_a_scale_that_is_no_factor_is_named(value: float, named: str):
    for format in FORMATS.values():
        _, scales = format.quantise(np.ones((3, 40), np.float32))
        scales[-1, -1] = value
        assert format.fault_of_scales(scales) == f"has a scale that is {named}"
