"""OpenTelemetry's standard variables, as they fill in what the configuration leaves open.

Read once, at the command line's edge. Headers, certificates, compression and timeouts of the exporters, and further
attributes of the resource, are left to OpenTelemetry's own reader. Source: OpenTelemetry specification, "Environment
Variable Specification" and "OpenTelemetry Protocol Exporter".
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from moonshard.serving.config.faults import endpoint_fault
from moonshard.serving.config.keys import Config, ConfigError, TelemetryConfig

_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"  # used as it is; the other one is a base
_ENDPOINTS = (_TRACES_ENDPOINT, "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL_NAMES: Mapping[str, Literal["grpc", "http"]] = {"grpc": "grpc", "http/protobuf": "http"}
_SAMPLERS: Mapping[str, tuple[float | None, bool]] = {  # the ratio (None: OTEL_TRACES_SAMPLER_ARG), and parent-based
    "always_on": (1.0, False),
    "always_off": (0.0, False),
    "traceidratio": (None, False),
    "parentbased_always_on": (1.0, True),
    "parentbased_always_off": (0.0, True),
    "parentbased_traceidratio": (None, True),
}


def with_environment(config: Config, environ: Mapping[str, str]) -> Config:
    """Where nothing is to be exported, as it was. ConfigError names each variable that cannot be honoured."""
    said = {name: value.strip() for name, value in environ.items() if name.startswith("OTEL_") and value.strip()}
    telemetry, faults = config.telemetry, []
    if telemetry.endpoint is None:
        telemetry = _at_endpoint(telemetry, said, faults)
    if telemetry.endpoint is None and not faults:
        return config
    if telemetry.protocol == "auto":
        telemetry = _by_protocol(telemetry, said, faults)
    if telemetry.service_name is None:
        telemetry = replace(telemetry, service_name=said.get("OTEL_SERVICE_NAME"))
    if telemetry.sampled_ratio is None:
        telemetry = _sampled(telemetry, said, faults)
    if faults:
        raise ConfigError(faults)
    return replace(config, telemetry=telemetry)


def _at_endpoint(telemetry: TelemetryConfig, said: Mapping[str, str], faults: list[str]) -> TelemetryConfig:
    if said.get("OTEL_SDK_DISABLED", "").lower() == "true" or said.get("OTEL_TRACES_EXPORTER") == "none":
        return telemetry
    name = _first_of(_ENDPOINTS, said)
    if name is None:
        return telemetry
    if (fault := endpoint_fault(said[name])) is not None:
        faults.append(f"{name}: {fault}")
    return replace(telemetry, endpoint=said[name], whole_url=name == _TRACES_ENDPOINT)


def _by_protocol(telemetry: TelemetryConfig, said: Mapping[str, str], faults: list[str]) -> TelemetryConfig:
    name = _first_of(_PROTOCOLS, said)
    if name is None:
        return telemetry
    if said[name] not in _PROTOCOL_NAMES:
        faults.append(f"{name}: expected one of {', '.join(_PROTOCOL_NAMES)}, got {said[name]!r}")
        return telemetry
    return replace(telemetry, protocol=_PROTOCOL_NAMES[said[name]])


def _sampled(telemetry: TelemetryConfig, said: Mapping[str, str], faults: list[str]) -> TelemetryConfig:
    sampler = said.get("OTEL_TRACES_SAMPLER")
    if sampler is None:
        return telemetry
    if sampler not in _SAMPLERS:
        faults.append(f"OTEL_TRACES_SAMPLER: expected one of {', '.join(_SAMPLERS)}, got {sampler!r}")
        return telemetry
    ratio, is_parent_based = _SAMPLERS[sampler]
    if ratio is None:
        ratio = _ratio(said.get("OTEL_TRACES_SAMPLER_ARG", "1"), faults)
    parent_based = is_parent_based if telemetry.parent_based is None else telemetry.parent_based
    return replace(telemetry, sampled_ratio=ratio, parent_based=parent_based)


def _ratio(text: str, faults: list[str]) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        faults.append(f"OTEL_TRACES_SAMPLER_ARG: expected a number from 0 to 1, got {text!r}")
    return ratio


def _first_of(names: tuple[str, ...], said: Mapping[str, str]) -> str | None:
    return next((name for name in names if name in said), None)
