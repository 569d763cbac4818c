"""Images in the integrations: what each trainer's own fields hold, and what is left out before it is trained on.

The oracle is the embedded worker's log: its ids, in which each picture is a run.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import logging
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from middleware_hub.client import NotUsableError, image_part
from middleware_hub.client.images import MultiModalData, SequenceImage
from middleware_hub.client.trajectory import Trajectory
from router.config import AbortConfig
from tests.support.image_vocabularies import image_vocabulary
from tests.support.pictures import digest
from tests.support.stack import Stack, stack
from tests.support.vocabularies import vocabulary
from tests.trainers import trainers
from tests.trainers.eyes import CAT, DOG, IMAGE, PAD, SUN, Eyes, features, opened
from tests.trainers.test_samples import PARAMS, ask, check, say
from tests.trainers.test_trl import trainer as grpo_trainer
from tests.trainers.test_verl import Verl, act, sequence
from tests.trainers.trainers import Trainer
from worker.engine.prompt_images import length_of
from worker.worker import EmbeddedWorker

FOLDER = image_vocabulary("qwen")
PROMPT = f"user: {IMAGE} Which button?\nassistant: "


@pytest.fixture(scope="module", params=["slime", "miles"])
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    with trainers.installed():
        trainers.tokenizer_folder(vocabulary("qwen"))  # it only counts: the processor is put in by the tests
        yield Trainer(request.param)


@pytest.fixture(scope="module")
def loops() -> Iterator[ModuleType]:
    if trainers.REAL:
        pytest.importorskip("verl")
    with trainers.installed():
        yield importlib.import_module("middleware_hub.integrations.verl")


@pytest.fixture
def served() -> Iterator[Stack]:
    options: Any = {"styles": ("cumulative",), "abort": AbortConfig(policy="return"), "folder": FOLDER}
    with stack("qwen", **options) as made:
        yield made
        assert made.idle()
        assert made.workers[0].out_of_range == []


def lengths(*pictures: bytes) -> list[int]:
    return [length_of(digest(one)) for one in pictures]


def placeholders(worker: EmbeddedWorker, tokens: Sequence[int]) -> int:
    return list(tokens).count(worker.vocabulary.encode_bare(PAD)[0])


def observe(*observations: Any) -> Any:
    left = iter(observations)
    return lambda _turn, _sample: next(left, None)


# -- slime and miles ---------------------------------------------------------------------------------------------------


def test_the_images_of_prompt_and_observations_reach_the_model(trainer: Trainer, served: Stack) -> None:
    (worker,) = served.workers
    say(worker, "Left. ", "Right.")
    trainer.processor = Eyes(FOLDER, CAT, DOG)
    args = trainer.args(served.url)
    generate = trainer.module.text_rollout(observe((f"\nuser: {IMAGE}{IMAGE} And now?\nassistant: ", [DOG, CAT])))
    sample = trainer.Sample(index=3, prompt=PROMPT, multimodal_inputs={"images": [opened(CAT)], "videos": None})
    trainer.generate(generate, args, sample, PARAMS)
    check(worker, sample)
    assert worker.log[-1].images == tuple(map(digest, (CAT, DOG, CAT)))
    assert placeholders(worker, sample.tokens) == sum(lengths(CAT, DOG, CAT))
    assert [one.tobytes() for one in sample.multimodal_inputs["images"]] == [
        opened(one).tobytes() for one in (CAT, DOG, CAT)
    ]
    assert set(sample.multimodal_train_inputs) == {"pixel_values", "image_grid_thw"}
    assert features(sample.multimodal_train_inputs, 0, 1, 0, lengths=lengths(CAT, DOG, CAT))
    batch = trainer.batch(args, [sample])
    if trainers.REAL:
        (inputs,) = batch["multimodal_train_inputs"]
        assert features(inputs, 0, 1, 0, lengths=lengths(CAT, DOG, CAT))


def test_an_aborted_sample_goes_on_with_its_images(trainer: Trainer, served: Stack) -> None:
    (worker,) = served.workers
    trainer.processor = Eyes(FOLDER, CAT, DOG)
    args = trainer.args(served.url, partial_rollout=True)
    generate = trainer.module.text_rollout(observe((f"\n{IMAGE} And now?\n", [DOG])))
    say(worker, "Left. ")
    say(worker, "Ri", finish="abort")
    sample = trainer.Sample(index=3, prompt=PROMPT, multimodal_inputs={"images": [opened(CAT)]})
    trainer.generate(generate, args, sample, PARAMS)
    assert sample.status is sample.Status.ABORTED
    assert len(sample.multimodal_inputs["images"]) == 1  # as the data set has it
    assert features(sample.multimodal_train_inputs, 0, 1, lengths=lengths(CAT, DOG))
    sample.metadata = json.loads(json.dumps(sample.metadata))  # a checkpoint of the data source
    say(worker, "ght.")
    trainer.generate(generate, args, sample, PARAMS)
    check(worker, sample)
    assert sample.status is sample.Status.COMPLETED
    assert len(sample.multimodal_inputs["images"]) == 2


async def looks(base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """An agent that sees: two screenshots in one conversation, and another one in a conversation beside it."""
    messages: list[Any] = [{"role": "user", "content": [image_part(CAT), {"type": "text", "text": "Where?"}]}]
    reply = await ask(base_url, messages, **request_kwargs)
    messages += [reply["choices"][0]["message"], {"role": "user", "content": [image_part(DOG)]}]
    await ask(base_url, messages, **request_kwargs)
    await ask(base_url, [{"role": "user", "content": [image_part(SUN)]}], **request_kwargs)
    return {"reward": 1.0}


def test_each_branch_of_an_agent_has_the_images_of_its_own_path(trainer: Trainer, served: Stack) -> None:
    (worker,) = served.workers
    say(worker, "Here.", "There.", "Sun.")
    trainer.processor = Eyes(FOLDER, CAT, DOG, SUN)
    args = trainer.args(served.url)
    sample = trainer.Sample(index=4, group_index=1, prompt="Find it.")
    made = trainer.generate(trainer.module.agent_rollout(looks), args, sample, PARAMS)
    for one, numbers, pictures in zip(made, [(0, 1), (2,)], [(CAT, DOG), (SUN,)], strict=True):
        check(worker, one)
        assert features(one.multimodal_train_inputs, *numbers, lengths=lengths(*pictures))
    trainer.batch(args, [made])


def test_another_number_of_tokens_is_told_and_not_trained_on(
    trainer: Trainer, served: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    """The sample has no placeholders left, for which a model would want features; and the batch takes it."""
    (worker,) = served.workers
    say(worker, "Left.")
    trainer.processor = Eyes(FOLDER, CAT, more={CAT: 3})
    args = trainer.args(served.url)
    sample = trainer.Sample(index=3, prompt=PROMPT, multimodal_inputs={"images": [opened(CAT)]})
    with caplog.at_level(logging.ERROR):
        trainer.generate(trainer.module.text_rollout(observe()), args, sample, PARAMS)
    assert sample.remove_sample
    assert "media_grid_mismatch" in sample.metadata["reasons"]
    (length,) = lengths(CAT)
    (fault,) = sample.metadata["faults"]
    assert fault.startswith(f"image {digest(CAT)} (56 x 56): the engine made {length} tokens of it")
    assert fault.endswith(f"processor makes {length + 3}")
    assert fault in caplog.text
    assert placeholders(worker, sample.tokens) == 0
    assert sample.multimodal_train_inputs is None
    trainer.batch(args, [sample])


def test_videos_of_a_prompt_are_refused(trainer: Trainer, served: Stack) -> None:
    sample = trainer.Sample(index=3, prompt=PROMPT, multimodal_inputs={"images": None, "videos": ["a.mp4"]})
    with pytest.raises(ValueError, match="a prompt has videos"):
        trainer.generate(trainer.module.text_rollout(observe()), trainer.args(served.url), sample, PARAMS)


# -- verl --------------------------------------------------------------------------------------------------------------

ROW: dict[str, Any] = {
    "raw_prompt": [
        {
            "role": "user",
            "content": [{"type": "image", "image": opened(CAT)}, {"type": "text", "text": " Which button?"}],
        }
    ],
    "global_steps": 5,
    "uid": "u1",
    "session_id": 0,
}


def seeing(loops: ModuleType, url: str, eyes: Eyes, **options: Any) -> Verl:
    made = Verl(loops, url, folder=FOLDER, processor=eyes, **options)
    made.config["actor_rollout_ref"]["rollout"]["prompt_length"] = 200
    return made


def test_verl_gets_pictures_and_expanded_ids(loops: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    say(worker, "Left. ", "Right.")
    verl = seeing(loops, served.url, Eyes(FOLDER, CAT, DOG))
    (output,), batch = verl.run("TextAgentLoop", row=ROW, act=act((f"\n{IMAGE} And now?\n", [DOG])))
    last = worker.log[-1]
    assert sequence(output) == last.input_ids + last.output_ids
    assert last.images == (digest(CAT), digest(DOG))
    assert [one.tobytes() for one in output.multi_modal_data["images"]] == [opened(one).tobytes() for one in (CAT, DOG)]
    assert sum(output.response_mask) == sum(len(record.output_ids) for record in worker.log)
    if batch is not None:
        (inputs,) = batch["fields"]["multi_modal_inputs"]
        assert features(inputs, 0, 1, lengths=lengths(CAT, DOG))


def test_verl_is_told_of_another_number_of_tokens(loops: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    say(worker, "Left.", "Left.")
    verl = seeing(loops, served.url, Eyes(FOLDER, CAT, more={CAT: -1}))
    (output,), _ = verl.run("TextAgentLoop", row=ROW, act=act())
    assert "media_grid_mismatch" in output.extra_fields["reasons"]
    assert not any(output.response_mask)
    assert placeholders(worker, sequence(output)) == 0
    (length,) = lengths(CAT)
    with pytest.raises(
        Exception, match=f"{digest(CAT)}.*made {length} tokens.*makes {length - 1}.*media_grid_mismatch"
    ):
        verl.run("TextAgentLoop", row=ROW, act=act(), inexact="raise")


def test_verl_cuts_no_image(loops: ModuleType, served: Stack) -> None:
    """A response that would end inside of an image ends before it; a prompt that is too long is refused, as verl refuses it."""
    (worker,) = served.workers
    say(worker, "Left. ", "Right.", "Left. ", "Right.", "Left.")
    eyes = Eyes(FOLDER, CAT, DOG)
    observation = (f"\n{IMAGE} And now?\n", [DOG])
    (whole,), _ = seeing(loops, served.url, eyes).run("TextAgentLoop", row=ROW, act=act(observation))
    pad = worker.vocabulary.encode_bare(PAD)[0]
    begin = whole.response_ids.index(pad)
    (length,) = lengths(DOG)
    short = seeing(loops, served.url, eyes, length=begin + length - 1)
    (cut,), _ = short.run("TextAgentLoop", row=ROW, act=act(observation))
    assert worker.log[-1].images == (digest(CAT), digest(DOG))
    assert cut.response_ids == whole.response_ids[:begin]
    assert len(cut.response_mask) == len(cut.response_logprobs) == begin
    assert len(cut.multi_modal_data["images"]) == 1
    short = seeing(loops, served.url, eyes)
    short.config["actor_rollout_ref"]["rollout"]["prompt_length"] = 5
    with pytest.raises(ValueError, match=r"rollout\.prompt_length=5"):
        short.run("TextAgentLoop", row=ROW, act=act())


def test_the_branches_of_an_agent_have_their_images_in_verl(loops: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    say(worker, "Here.", "There.", "Sun.")
    verl = seeing(loops, served.url, Eyes(FOLDER, CAT, DOG, SUN))
    outputs, _ = verl.run("SessionAgentLoop", row=ROW, agent=looks)
    shown = [[one.tobytes() for one in output.multi_modal_data["images"]] for output in outputs]
    assert shown == [[opened(one).tobytes() for one in row] for row in ((CAT, DOG), (SUN,))]


# -- TRL ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trl() -> Iterator[ModuleType]:
    if trainers.REAL:
        pytest.importorskip("trl")
    with trainers.installed():
        yield importlib.import_module("middleware_hub.integrations.trl")


MESSAGES = [{"role": "user", "content": [{"type": "image", "image": opened(CAT)}, {"type": "text", "text": " Where?"}]}]


def seeing_trainer(trl: ModuleType, eyes: Eyes, *, sees: bool = True) -> Any:
    made = grpo_trainer()
    made.processing_class = eyes
    if sees:
        setattr(made, trl.SEES, True)
    return made


def test_trl_gets_the_images_of_each_completion(trl: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    say(worker, "Left. ", "Right.")
    rollout = trl.text_rollout(served.url, act((f"\n{IMAGE} And now?\n", [DOG])), weights=None)
    batch = rollout([MESSAGES], seeing_trainer(trl, Eyes(FOLDER, CAT, DOG)))
    (ids,) = (a + b for a, b in zip(batch["prompt_ids"], batch["completion_ids"], strict=True))
    last = worker.log[-1]
    assert ids == last.input_ids + last.output_ids
    assert last.images == (digest(CAT), digest(DOG))
    assert placeholders(worker, batch["completion_ids"][0]) == sum(lengths(DOG))
    assert sum(batch["env_mask"][0]) == sum(len(record.output_ids) for record in worker.log)
    assert [[one.tobytes() for one in row] for row in batch["images"]] == [
        [opened(one).tobytes() for one in (CAT, DOG)]
    ]


def test_trl_is_told_of_another_number_of_tokens(trl: ModuleType, served: Stack) -> None:
    say(served.workers[0], "Left. ")
    eyes = Eyes(FOLDER, CAT, more={CAT: 1})
    (length,) = lengths(CAT)
    with pytest.raises(NotUsableError, match=f"{digest(CAT)}.*{length} tokens.*{length + 1}.*media_grid_mismatch"):
        trl.text_rollout(served.url, act(), weights=None)([MESSAGES], seeing_trainer(trl, eyes))


def test_a_trainer_that_takes_no_images_of_rollouts_is_refused(trl: ModuleType, served: Stack) -> None:
    """TRL's own would give the placeholders no features, without a word."""
    say(served.workers[0], "Left. ")
    with pytest.raises(ValueError, match=r"seeing\(GRPOTrainer\)"):
        trl.text_rollout(served.url, act(), weights=None)(
            [MESSAGES], seeing_trainer(trl, Eyes(FOLDER, CAT), sees=False)
        )


def test_a_seeing_trainer_leads_images_where_those_of_tools_go(trl: ModuleType) -> None:
    """Only while completions are scored, and only those of the rollouts."""

    class Own:
        """What a `GRPOTrainer` does with what `_generate` returns."""

        tools: list[Any] = []  # noqa: RUF012 - as the trainer has it
        given: Any = None

        def _generate(self, _prompts: list[Any]) -> Any:
            assert not self.tools
            return 1, 2, 3, 4, 5, {"usable": [True], **({"images": self.given} if self.given else {})}, None, []

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            *_, extra, images, of_tools = self._generate(inputs)
            return extra, images, of_tools, bool(self.tools)

    made = trl.seeing(Own)()
    assert made._generate_and_score_completions([]) == ({"usable": [True]}, None, [], False)
    made.given = [["picture"], []]
    found = made._generate_and_score_completions([])
    assert found == ({"usable": [True]}, made.given, made.given, True)
    assert made.tools == []
    made.tools = [print]
    with pytest.raises(ValueError, match="exclude each other"):
        made._generate_and_score_completions([])


# -- what all share ----------------------------------------------------------------------------------------------------


def a_sequence(*images: SequenceImage) -> Trajectory:
    count = images[-1].span[1] + 2
    mask = [0] * (count - 1) + [1]
    fields = ([5] * count, mask, [0.0] * count, count - 1, (), (), "", True, 0, (), "stop", {}, None, {})
    return Trajectory(*fields, multi_modal_data=MultiModalData(images))


def shown(content: bytes, start: int, length: int, *, data: bool = True) -> SequenceImage:
    span = (start, start + length)
    return SequenceImage(digest(content), "image/png", 56, 56, span, None, None, content if data else None)


def test_a_file_that_is_gone_leaves_the_sequence_out() -> None:
    images = importlib.import_module("middleware_hub.integrations.images")
    eyes = Eyes(FOLDER, CAT, DOG)
    (one, two) = lengths(CAT, DOG)
    found = a_sequence(shown(CAT, 1, one), shown(DOG, one + 1, two, data=False))
    given = images.seen(found, eyes)
    assert given.trajectory.reasons == ("media_missing",)
    assert given.faults == (f"image {digest(DOG)}: the router does not hold its file any more",)
    assert not given.trajectory.exact
    assert eyes.calls == 0


def test_neighbours_are_counted_one_by_one() -> None:
    """That the sum is right says nothing: one image has a token more, and its neighbour one less."""
    images = importlib.import_module("middleware_hub.integrations.images")
    one, two = lengths(CAT, DOG)
    found = a_sequence(shown(CAT, 1, one), shown(DOG, one + 1, two))
    whole = images.seen(found, Eyes(FOLDER, CAT, DOG))
    assert whole.trajectory is found
    assert features(whole.inputs, 0, 1, lengths=[one, two])
    wrong = images.seen(found, Eyes(FOLDER, CAT, DOG, more={CAT: 1, DOG: -1}))
    assert wrong.trajectory.reasons == ("media_grid_mismatch",)
    assert [digest(picture) in fault for picture, fault in zip((CAT, DOG), wrong.faults, strict=True)] == [True, True]


@pytest.mark.parametrize(("alpha", "reasons"), [(255, ()), (254, ("media_transparent",))])
def test_transparent_parts_are_told(alpha: int, reasons: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    """vLLM 0.32.0 paints them white, and SGLang 0.5.23 mostly as the file has them. Both make equally many tokens."""
    images = importlib.import_module("middleware_hub.integrations.images")
    drawn = opened(CAT).convert("RGBA")
    drawn.putpixel((3, 4), (0, 0, 0, alpha))
    stream = io.BytesIO()
    drawn.save(stream, "PNG")
    content = stream.getvalue()
    found = a_sequence(shown(content, 1, *lengths(content)))
    given = images.seen(found, Eyes(FOLDER, content))
    assert (given.trajectory.reasons, given.trajectory.exact, given.faults) == (reasons, found.exact, ())
    assert [digest(content) in record.message for record in caplog.records] == [True] * len(reasons)
    assert [picture.mode for picture in given.images] == ["RGB"]


def test_a_trainer_without_a_processor_is_told_what_is_missing() -> None:
    images = importlib.import_module("middleware_hub.integrations.images")
    found = a_sequence(shown(CAT, 1, *lengths(CAT)))
    with pytest.raises(ValueError, match=r"NoneType.*has no `image_token`"):
        images.seen(found, None)
    text = dataclasses.replace(found, multi_modal_data=MultiModalData())
    assert images.seen(text, None).trajectory is text
    assert np.array_equal(text.tokens, found.tokens)
