"""OpenTelemetry's variables fill in what the configuration leaves open, and nothing else."""

import subprocess
import sys
from dataclasses import replace

import pytest

from moonshard.serving.commands.options import ConfigOptions
from moonshard.serving.config.keys import ConfigError, TelemetryConfig
from moonshard.serving.config.reading import load_config
from moonshard.serving.observe.spans.environment import with_environment

URL = "http://collector:4317"


def resolved(*overrides: str, **environ: str) -> TelemetryConfig:
    return with_environment(load_config(None, overrides), environ).telemetry


def test_without_an_endpoint_nothing_is_exported_and_no_other_variable_matters():
    config = load_config(None)
    assert with_environment(config, {"OTEL_TRACES_SAMPLER": "nonsense", "OTEL_SERVICE_NAME": "x"}) is config
    assert config.telemetry.endpoint is None
    assert resolved(OTEL_EXPORTER_OTLP_ENDPOINT=" ").endpoint is None


def test_the_variables_fill_in_what_is_not_said():
    found = resolved(
        OTEL_EXPORTER_OTLP_ENDPOINT=URL,
        OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
        OTEL_SERVICE_NAME="mine",
        OTEL_TRACES_SAMPLER="parentbased_traceidratio",
        OTEL_TRACES_SAMPLER_ARG="0.25",
    )
    assert found == TelemetryConfig(
        endpoint=URL, protocol="http", service_name="mine", sampled_ratio=0.25, parent_based=True
    )


def test_the_configuration_goes_before_the_variables():
    said = TelemetryConfig(
        endpoint="http://own:1", protocol="grpc", service_name="own", sampled_ratio=0.5, parent_based=True
    )
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": URL,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_SERVICE_NAME": "other",
        "OTEL_TRACES_SAMPLER": "always_off",
        "OTEL_SDK_DISABLED": "true",
    }
    assert with_environment(replace(load_config(None), telemetry=said), variables).telemetry == said


def test_the_variable_for_traces_goes_before_the_general_one():
    found = resolved(OTEL_EXPORTER_OTLP_ENDPOINT="http://general:1", OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=URL)
    assert (found.endpoint, found.whole_url) == (URL, True)
    assert resolved(OTEL_EXPORTER_OTLP_ENDPOINT=URL).whole_url is False


@pytest.mark.parametrize(
    "endpoint",
    ["https://user:hunter2@host", "http://hunter2@host:4318/v1/traces", "user:hunter2@host", "http://a:hunter2@h:x"],
)
def test_an_endpoint_that_has_a_password_is_refused_and_not_quoted(endpoint: str):
    with pytest.raises(ConfigError, match=r"^telemetry\.endpoint: .*OTEL_EXPORTER_OTLP_HEADERS") as refused:
        load_config(None, [f"telemetry.endpoint={endpoint}"])
    assert "hunter2" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"^OTEL_EXPORTER_OTLP_ENDPOINT: ") as refused:
        resolved(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("switch", [{"OTEL_SDK_DISABLED": "TRUE"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_the_variables_can_switch_off_what_they_switch_on(switch: dict[str, str]):
    assert resolved(OTEL_EXPORTER_OTLP_ENDPOINT=URL, **switch).endpoint is None


@pytest.mark.parametrize(
    ("sampler", "ratio", "parent_based"),
    [
        ("always_on", 1.0, False),
        ("always_off", 0.0, False),
        ("traceidratio", 0.1, False),
        ("parentbased_always_on", 1.0, True),
        ("parentbased_always_off", 0.0, True),
        ("parentbased_traceidratio", 0.1, True),
    ],
)
def test_every_sampler_of_the_specification(sampler: str, ratio: float, parent_based: bool):
    found = resolved(f"telemetry.endpoint={URL}", OTEL_TRACES_SAMPLER=sampler, OTEL_TRACES_SAMPLER_ARG="0.1")
    assert (found.sampled_ratio, found.parent_based) == (ratio, parent_based)


@pytest.mark.parametrize(
    ("variables", "fault"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, "OTEL_EXPORTER_OTLP_ENDPOINT: expected http://host:port"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL: expected one of grpc, http/proto"),
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "OTEL_TRACES_SAMPLER: expected one of always_on"),
        (
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "nan"},
            "OTEL_TRACES_SAMPLER_ARG: expected",
        ),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "x"}, "OTEL_TRACES_SAMPLER_ARG: expected"),
    ],
)
def test_a_variable_that_cannot_be_honoured_is_named(variables: dict[str, str], fault: str):
    with pytest.raises(ConfigError) as raised:
        resolved(**({"OTEL_EXPORTER_OTLP_ENDPOINT": URL} | variables))
    assert str(raised.value).startswith(fault)


@pytest.mark.parametrize(
    "endpoint", ["collector", "collector:4317", "ftp://x:1", "http://", "http://x:y", "http://x:0"]
)
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str):
    with pytest.raises(ConfigError, match=r"telemetry.endpoint: expected http://host:port"):
        load_config(None, [f"telemetry.endpoint={endpoint}"])


@pytest.mark.parametrize("setting", ["sampled_ratio=1.5", "sampled_ratio=-1", "protocol=udp", "service_name=''", "x=1"])
def test_a_setting_that_is_out_of_range_is_refused(setting: str):
    with pytest.raises(ConfigError, match=rf"telemetry\.{setting.partition('=')[0]}: "):
        load_config(None, [f"telemetry.{setting}"])


def test_commands_read_the_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", URL)
    assert ConfigOptions().load().telemetry.endpoint == URL


def test_who_exports_nothing_imports_no_sdk():
    """FastAPI imports OpenTelemetry's API for itself."""
    code = """
import sys
import moonshard.serving.gateway.process, moonshard.serving.worker.spans, moonshard.serving.commands.options
assert not [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
import moonshard.serving.observe.spans.otlp
assert "opentelemetry.sdk" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
