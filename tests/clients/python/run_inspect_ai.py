"""inspect_ai: evaluations of one sample each; what they answered stands in their logs."""

import json
import os
import sys
from tempfile import TemporaryDirectory

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample
from inspect_ai.model import Model, get_model
from inspect_ai.scorer import exact
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


def evaluated(model: Model, question: str, target: str, *solvers: object) -> EvalSample:
    task = Task(dataset=[Sample(input=question, target=target)], solver=[*solvers, generate()], scorer=exact())
    with TemporaryDirectory() as logs:
        (log,) = eval(task, model=model, display="none", log_dir=logs)
        assert log.status == "success", log.error
        (sample,) = log.samples
    return sample


def said(sample: EvalSample) -> dict:
    (usage,) = sample.model_usage.values()
    assert sample.scores["exact"].value == "C"
    return {"text": sample.output.completion, "usage": [usage.input_tokens, usage.output_tokens]}


def with_tool(model: Model, asked: dict) -> dict:
    @tool
    def get_weather():
        async def execute(city: str) -> str:
            """Weather in a city

            Args:
                city: a city
            """
            return asked["weather"]

        return execute

    sample = evaluated(model, asked["tool_question"], asked["tool_answer"], use_tools(get_weather()))
    calls = [call for message in sample.messages for call in getattr(message, "tool_calls", None) or ()]
    return {"calls": [call.arguments for call in calls], "answer": sample.output.completion}


def main() -> None:
    asked = json.loads(sys.argv[1])
    os.environ["MOONSHARD_API_KEY"] = "none"
    served = {"base_url": asked["base_url"], "max_retries": 0}
    model = get_model(f"openai-api/moonshard/{asked['model']}", **served)
    whole = said(evaluated(model, asked["question"], asked["answer"]))
    streaming = get_model(f"openai-api/moonshard/{asked['model']}", stream=True, **served)
    streamed = said(evaluated(streaming, asked["question"], asked["answer"]))
    told = {
        "chat": whole["text"],
        "usage": whole["usage"],
        "pieces": [streamed["text"]],
        "stream_usage": streamed["usage"],
        "overflow": evaluated(model, asked["too_long"], "").output.stop_reason,
    }
    print(json.dumps({**told, **with_tool(model, asked)}))


main()
