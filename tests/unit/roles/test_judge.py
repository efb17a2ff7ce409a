"""A judge: its inputs, its training, and results of a contradictory or unsure judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rillflow.errors import ConfigError, FormulaError, ModelError, RewardError
from rillflow.formulas.judging import both_orders, expected_rating, label_shares
from rillflow.formulas.losses import label_loss
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model, save_model
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.rewards.config import JudgeConfig
from rillflow.rewards.judge_prompt import KEPT, FrameConfig, kept_frame
from rillflow.roles.comparisons import Question, Questioner, prompt_text
from rillflow.roles.judge import Judge, judge_metrics
from rillflow.roles.model_shard import ModelShard
from rillflow.roles.reward import OUTCOMES
from rillflow.roles.trained_role import Training
from rillflow.tasks.arithmetic import arithmetic_examples
from rillflow.tasks.encoded import Encoder
from rillflow.tasks.preference import PREFERENCES
from rillflow.tasks.prompts import answered_batch
from rillflow.training.config import PassesConfig, TrainConfig

FRAME = FrameConfig(template="{prompt}|{first}|{second}>")
RATES = FrameConfig(template="{prompt}|{answer}>", labels=("1", "2", "3"))


def new_model(context: int = 24, seed: int = 0) -> LanguageModel:
    torch.set_num_threads(1)
    small = NewModel(hidden=32, layers=1, heads=2, kv_heads=1, context=context, alphabet="0123456789+-=|>AB")
    return load_model(ModelConfig(new=small), seed=seed, device=torch.device("cpu"), base=Path())


class Said(Judge):
    """A judge with outputs from a table of shown answers; counts its inputs."""

    said: dict[tuple[str, ...], list[float]]
    asked: int = 0

    def _shares(self, questions: Sequence[Question]) -> Tensor:
        self.asked += len(questions)
        return torch.tensor([self.said[each.answers] for each in questions], dtype=torch.float64).view(-1, 2)


def judge(model: LanguageModel, frame: FrameConfig = FRAME, kind: type[Judge] = Judge, **how: Any) -> Any:
    judging = JudgeConfig(model="", **how)
    training = Training(config=TrainConfig(lr=3e-3), seed=0, updates=100)
    return kind(ModelShard.whole(model), training, frame=frame, judging=judging)


def said(table: dict[tuple[str, str], float], **how: Any) -> Any:
    found = judge(new_model(), kind=Said, **how)
    found.said = {shown: [first, 1 - first] for shown, first in table.items()}
    return found


def rows(model: LanguageModel, answers: Sequence[str], prompts: Sequence[int] | None = None) -> Batch:
    """Return answers as sampled; all for one prompt, or for the given ones."""
    places = prompts or [0] * len(answers)
    tokens = [model.tokenizer.encode_completions([text])[0] for text in answers]
    asked = [model.tokenizer.encode(f"1+{place}=") for place in places]
    return Batch(
        ids=row_ids([RowId(0, place, number) for number, place in enumerate(places)]),
        fields={
            "tokens": Ragged.from_rows([[*one, *two] for one, two in zip(asked, tokens, strict=True)]),
            "loss_mask": Ragged.from_rows(
                [[False] * len(one) + [True] * len(two) for one, two in zip(asked, tokens, strict=True)],
                torch.bool,
            ),
            "columns": Ragged.from_text(json.dumps({"prompt": f"1+{place}="}) for place in places),
        },
    )


def test_by_hand() -> None:
    shares = label_shares(torch.tensor([[0.0, 0.0], [3.0, 3.0 - torch.log(torch.tensor(4.0))]]))
    assert shares[:, 0].tolist() == pytest.approx([0.5, 0.8])
    found = both_orders(torch.tensor([0.9, 0.6]), torch.tensor([0.7, 0.2]))
    assert found.likely.tolist() == pytest.approx([0.6, 0.7])
    assert found.contradicts.tolist() == [True, False], "it model_outputs A both times, and names two answers"
    assert found.bias.tolist() == pytest.approx([0.3, -0.1])
    assert float(both_orders(torch.tensor([1.0]), torch.tensor([1.0])).likely) == 0.5, (
        "A whatever it is shown"
    )
    assert float(expected_rating(torch.tensor([[0.25, 0.25, 0.5]]), (1.0, 2.0, 3.0))) == 2.25
    with pytest.raises(FormulaError, match="other_first has shape"):
        both_orders(torch.zeros(2), torch.zeros(3))
    with pytest.raises(FormulaError, match="label_shares"):
        label_shares(torch.zeros(3, 1))


def test_a_conversation_is_shown_to_a_judge_one_turn_a_line() -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "image"}, {"type": "text", "text": "2?"}]
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": parts}, {"role": "assistant"}]
    assert prompt_text(json.dumps({"prompt": turns})) == "system: Add.\nuser: 1+2?\nassistant: "
    assert prompt_text(json.dumps({"prompt": "1+2="})) == "1+2="


def test_what_is_asked_keeps_answers_whole_and_the_prompt_s_end() -> None:
    tokenizer = new_model().tokenizer
    asked = Questioner(tokenizer, FRAME, 12).encoded(Question(prompt="123456789", answers=("42", "7")))
    assert tokenizer.decode(asked) == "56789|42|7>", "eleven, and one for the label"
    with pytest.raises(ModelError, match="leave no room"):
        Questioner(tokenizer, FRAME, 12).encoded(Question(prompt="1", answers=("42424242", "7")))
    with pytest.raises(ModelError, match="label 'AB' is 2 tokens"):
        Questioner(tokenizer, FrameConfig(template=FRAME.template, labels=("AB", "A")), 12)
    with pytest.raises(ModelError, match="no character 'x'"):
        Questioner(tokenizer, FrameConfig(template="x{prompt}|{first}|{second}>"), 12)


def test_a_chat_template_writes_the_frame_and_no_answer_ends_its_message() -> None:
    alphabet = "0123456789+=|>ABua:<end/s_"
    small = NewModel(hidden=32, layers=1, heads=2, kv_heads=1, context=64, alphabet=alphabet)
    model = load_model(ModelConfig(new=small), seed=0, device=torch.device("cpu"), base=Path())
    tokenizer, frame = model.tokenizer, FrameConfig(template="{prompt}|{first}|{second}>", chat=True)
    (end,) = tokenizer.stop_tokens
    (mark,) = tokenizer.pieces([end])
    with pytest.raises(ModelError, match="no chat template"):
        Questioner(tokenizer, frame, 64)
    tokenizer._library.chat_template = (
        "{% for m in messages %}u:{{ m['content'] }}" + mark + "{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    tokens = Questioner(tokenizer, frame, 64).encoded(Question(prompt="1+1=", answers=("2", f"3{mark}")))
    assert "".join(tokenizer.pieces(tokens)) == f"u:1+1=|2|3{mark}>{mark}a:"
    assert tokens.count(end) == 1 and tokens[-3] == end, "what an answer spells is text"
    pairs = rows(model, ["1", "2"])
    assert judge(model, frame).score(pairs).dense("valid").all()
    tokenizer._library.chat_template = "{% for m in messages %}{{ m['content'] * 2 }}{% endfor %}"
    with pytest.raises(ModelError, match="renders the placeholders"):
        Questioner(tokenizer, frame, 64)


@pytest.mark.parametrize(
    ("template", "labels", "why"),
    [
        ("{prompt}", ("A", "B"), "placeholders"),
        ("{prompt}{second}{first}", ("A", "B"), "in this order"),
        ("{prompt}{first}{second}", ("A", "B", "C"), "two labels"),
        ("{prompt}{first}{second}", ("A", "A"), "two different"),
        ("{prompt}{answer}", ("good", "bad"), "could not convert"),
        ("{prompt}{answer}", ("1",), "two different"),
    ],
)
def test_a_frame_that_asks_nothing_is_refused(template: str, labels: tuple[str, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        FrameConfig(template=template, labels=labels)


def test_it_learns_which_of_two_answers_is_right_whichever_stands_first() -> None:
    model = new_model()
    role = judge(model)
    examples = PREFERENCES.made(arithmetic_examples(size=12, digits=1, operators="+", seed=0), 0)
    pairs = answered_batch(Encoder(tokenizer=model.tokenizer).rows(examples, PREFERENCES), epoch=0)
    first = role.update(pairs, label_loss, PassesConfig())
    assert first["judge/nll/mean"].count == 24, "each pair in both orders"
    once = judge(new_model()).update(pairs, label_loss, PassesConfig(), orders="random")
    assert once["judge/nll/mean"].count == 12
    last = role.update(pairs, label_loss, PassesConfig(epochs=40, minibatches=2))
    assert last["judge/nll/mean"].value < first["judge/nll/mean"].value / 2
    scores = role.score(pairs)
    likely = scores.dense("rewards").view(-1, 2)
    assert torch.allclose(likely.sum(1), torch.ones(12)), "one of the two wins"
    assert (likely[:, 0] > 0.5).float().mean() > 0.8
    assert judge_metrics(scores)["judge/contradiction/share"].count == 24


def test_the_directory_keeps_how_it_is_asked(tmp_path: Path) -> None:
    model = new_model()
    role = judge(model)
    save_model(model, tmp_path / "judge")
    settings = json.loads((tmp_path / "judge/config.json").read_text())
    assert kept_frame(settings) == FRAME
    again = load_model(ModelConfig(path="judge"), seed=1, device=torch.device("cpu"), base=tmp_path)
    assert kept_frame(again.module.config.to_dict()) == FRAME and KEPT in settings
    answers = rows(model, ["1", "2"])
    assert torch.equal(judge(again).score(answers).dense("rewards"), role.score(answers).dense("rewards"))
    with pytest.raises(ConfigError, match="judge_frame"):
        kept_frame({KEPT: {"template": "no places"}})
    assert kept_frame({}) is None


def test_every_answer_meets_every_other_of_its_prompt_and_no_one_else() -> None:
    likely = {("1", "2"): 0.8, ("2", "1"): 0.4, ("1", "3"): 0.9, ("3", "1"): 0.1}
    likely |= {("2", "3"): 0.7, ("3", "2"): 0.3, ("8", "9"): 1.0, ("9", "8"): 0.0}
    role = said(likely)
    found = role.score(rows(role.model, ["1", "8", "2", "3", "9"], [0, 1, 0, 0, 1]))
    one_two, one_three, two_three = 0.7, 0.9, 0.7
    expected = [(one_two + one_three) / 2, 1.0, (0.3 + two_three) / 2, (0.1 + 0.3) / 2, 0.0]
    assert found.dense("rewards").tolist() == pytest.approx(expected)
    assert found.dense("bias").tolist() == pytest.approx([0.05, 0.0, 0.05, 0.0, 0.0])
    assert role.asked == 2 * (3 + 1)
    assert judge_metrics(found)["judge/contradiction/share"].value == 0


def test_in_a_tournament_the_winner_meets_the_next() -> None:
    """Of 1, 2, 3, 4: 2 beats 1, 2 beats 3, 4 beats 2; a score is the mean of an answer's own comparisons."""
    beats = {("1", "2"): 0.2, ("2", "3"): 0.9, ("2", "4"): 0.3}
    likely = {**beats, **{(b, a): 1 - p for (a, b), p in beats.items()}}
    role = said(likely, compare="tournament")
    found = role.score(rows(role.model, ["1", "2", "3", "4"]))
    assert found.dense("rewards").tolist() == pytest.approx([0.2, (0.8 + 0.9 + 0.3) / 3, 0.1, 0.7])
    assert role.asked == 2 * 3, "n - 1 comparisons, each in both orders"


def test_a_judge_that_contradicts_itself_is_counted_and_near_ties_abstain() -> None:
    """It always outputs A: both orders cancel out, and the result is an abstention, not 0."""
    always = {(a, b): 0.9 for a in "123" for b in "123"}
    role = said(always, abstain=0.05)
    found = role.score(rows(role.model, ["1", "2", "3"]))
    assert found.dense("valid").tolist() == [False] * 3
    assert [OUTCOMES[each] for each in found.dense("outcome").tolist()] == ["abstain"] * 3
    assert found.ragged("message").to_text() == ["every comparison is a tie"] * 3
    metrics = {name: metric.value for name, metric in judge_metrics(found).items()}
    assert metrics["judge/contradiction/share"] == 1.0 and metrics["judge/tie/share"] == 1.0
    assert metrics["judge/position_bias/mean"] == pytest.approx(0.4)
    assert metrics["reward/abstain/share"] == 1.0 and "reward/score/max" not in metrics
    counted = said(always).score(rows(role.model, ["1", "2"]))
    assert counted.dense("rewards").tolist() == pytest.approx([0.5, 0.5]), "without abstain it is a tie"
    assert counted.dense("contradicted").tolist() == [1.0, 1.0]


def test_rows_that_cannot_be_read_are_errors_and_the_others_are_compared() -> None:
    role = said({("1", "2"): 0.9, ("2", "1"): 0.1})
    found = role.score(rows(role.model, ["1", "7" * 20, "2"]))
    assert [OUTCOMES[each] for each in found.dense("outcome").tolist()] == ["score", "error", "score"]
    assert "leave no room" in found.ragged("message").to_text()[1]
    assert found.dense("rewards").tolist() == pytest.approx([0.9, 0.0, 0.1])
    alone = role.score(rows(role.model, ["1", "7" * 20]))
    assert [OUTCOMES[each] for each in alone.dense("outcome").tolist()] == ["abstain", "error"]
    assert "no other answer" in alone.ragged("message").to_text()[0]
    assert bool(alone.dense("bias").isnan().all())
    with pytest.raises(RewardError, match="can read none of 1 rows"):
        role.score(rows(role.model, ["7" * 20]))


def test_a_rating_is_what_labels_are_worth_by_how_likely_they_are() -> None:
    model = new_model()
    role = judge(model, RATES)
    answers = rows(model, ["1", "42"])
    found = role.score(answers).dense("rewards")
    asked = Questioner(model.tokenizer, RATES, model.context)
    texts = [asked.encoded(Question(prompt="1+0=", answers=(text,))) for text in ("1", "42")]
    for tokens, value in zip(texts, found.tolist(), strict=True):
        with torch.no_grad():
            logits = model.module(input_ids=torch.tensor([tokens])).logits[0, -1, asked.labels].double()
        assert value == pytest.approx(
            float(logits.softmax(0) @ torch.tensor([1.0, 2.0, 3.0]).double()), abs=1e-5
        )
    assert role.score(rows(model, ["1"])).dense("valid").tolist() == [True], "it needs no other answer"


def test_a_pair_without_room_is_left_out_and_counted() -> None:
    model = new_model()
    role = judge(model)
    pairs = rows(model, ["1", "2", "1" * 12, "2" * 12], [0, 0, 1, 1])
    pairs = Batch(ids=torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]), fields=pairs.fields)
    found = role.update(pairs, label_loss, PassesConfig())
    assert found["judge/left_out/share"].value == 0.5 and found["judge/nll/mean"].count == 2
    with pytest.raises(RewardError, match="can read none of 1 pairs"):
        role.update(pairs.slice(2, 4), label_loss, PassesConfig())
