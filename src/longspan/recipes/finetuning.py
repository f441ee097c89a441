"""Finetuning on documents: Longformer's published settings, and a start for files of your own.

What was published without being exact is decided here: two labels are told apart by a softmax over
two scores, where the paper has binary cross-entropy on one, which is the same model; and IMDB's
validation examples are a twentieth of its training examples. Where many tokens of a document are
global, as choices and sentences are, batches are padded: their rows cost as many scores as there
are tokens beside them.
"""

from dataclasses import replace

from longspan.data.examples import Examples
from longspan.train.finetuning import Answers, Checks, Finetuning, Hops, Mentions, Start
from longspan.train.recipe import Optimizer


def classify() -> Finetuning:
    """Labels of your documents: --data FILE --text COLUMN --label COLUMN --model FOLDER."""
    return Finetuning(
        name="classify",
        task="classify",
        measure="macro_f1",
        epochs=5.0,
        batch=16,
        compile="auto",
    )


def hyperpartisan() -> Finetuning:
    """Hyperpartisan news as published: 80/10/10, F1, five seeds by --seeds 5; 94.8 in the paper."""
    return Finetuning(
        name="hyperpartisan",
        task="classify",
        measure="f1",
        data=Examples(positive="true"),
        epochs=15.0,
        too_long="head",
        compile="auto",
    )


def imdb() -> Finetuning:
    """IMDB reviews as published: --data TRAIN --test TEST, accuracy; 95.7 in the paper."""
    return Finetuning(
        name="imdb",
        task="classify",
        measure="accuracy",
        data=Examples(valid_share=0.05),
        epochs=15.0,
        too_long="head",
        evaluation=Checks(batch=64),
        compile="auto",
    )


def spans() -> Finetuning:
    """Answers in your documents: --data FILE --text, --question and --answers COLUMN --model."""
    return Finetuning(
        name="spans",
        task="spans",
        measure="best_f1",
        epochs=3.0,
        batch=8,
        too_long="split",
        overlap=128,
        compile="auto",
    )


def triviaqa() -> Finetuning:
    """TriviaQA as published, from rows of text, question, answers and id; F1 75.2 in the paper."""
    return Finetuning(
        name="triviaqa",
        task="spans",
        measure="f1",
        answers=Answers(longest=30, best=20, threshold=-1e9, style="triviaqa"),
        epochs=5.0,
        warmup=1000.0,
        too_long="head",
        compile="auto",
    )


def cuad() -> Finetuning:
    """Clauses of contracts: several right spans or none, whole contracts in pieces of 4,096."""
    return Finetuning(
        name="cuad",
        task="spans",
        measure="best_f1",
        model=Start(length=4096),
        answers=Answers(longest=256, best=20, blanks=1.0),  # two thirds have no answer
        epochs=2.0,
        batch=16,
        learning_rate=1e-4,
        accumulate=8,  # a contract may have 100,000 tokens
        too_long="split",
        overlap=256,
        evaluation=Checks(batch=4, limit=500),
        compile="auto",
    )


def coref() -> Finetuning:
    """Who and what your documents speak of, and where: --data FILE --model, JSON lines or CoNLL."""
    return Finetuning(
        name="coref",
        task="coref",
        measure="conll",
        epochs=20.0,
        batch=1,
        learning_rate=5e-5,
        optimizer=Optimizer(clip=1.0, schedule="linear", head_scale=10.0),
        too_long="split",
        evaluation=Checks(batch=1),
    )


def litbank() -> Finetuning:
    """Characters, places and things in novels, singletons included: --data TRAIN --test DEV."""
    return replace(
        coref(),
        name="litbank",
        mentions=Mentions(longest=20, keep=0.3),
        epochs=30.0,
        learning_rate=1e-4,
        optimizer=Optimizer(clip=1.0, schedule="linear", head_scale=5.0),
    )


def ontonotes() -> Finetuning:
    """OntoNotes in CoNLL-2012's form as published, segments of 4,096; F1 78.6 in the paper."""
    return replace(coref(), name="ontonotes", learning_rate=1e-5)


def choice() -> Finetuning:
    """The best of given answers: --data FILE --text, --question, --choices, --answers COLUMN."""
    return Finetuning(
        name="choice",
        task="choice",
        measure="accuracy",
        data=Examples(columns={"answers": "answer"}),
        epochs=3.0,
        batch=16,
        too_long="split",
        packed=False,
    )


def wikihop() -> Finetuning:
    """WikiHop as published: --data train.json --test dev.json, accuracy; 75.0 in the paper."""
    columns = {"text": "supports", "question": "query", "choices": "candidates"}
    return Finetuning(
        name="wikihop",
        task="choice",
        measure="accuracy",
        data=Examples(columns={**columns, "answers": "answer"}, valid_share=0.05),
        epochs=15.0,
        warmup=200.0,
        too_long="split",
        packed=False,
        accumulate=8,  # a question may have 50,000 tokens
    )


def race() -> Finetuning:
    """RACE, four choices a question: --data FILE --test FILE with its columns, accuracy."""
    columns = {"text": "article", "question": "questions", "choices": "options"}
    return Finetuning(
        name="race",
        task="choice",
        measure="accuracy",
        model=Start(length=2048),
        data=Examples(columns=columns, valid_share=0.05),
        epochs=3.0,
        too_long="split",
        packed=False,
        evaluation=Checks(batch=64),
    )


def multihop() -> Finetuning:
    """Answers with evidence: --data FILE with text, question, answer, evidence as in HotpotQA."""
    return Finetuning(
        name="multihop",
        task="multihop",
        measure="joint_f1",
        data=Examples(columns={"answers": "answer"}),
        epochs=5.0,
        batch=16,
        learning_rate=5e-5,
        too_long="split",
        packed=False,
    )


def hotpotqa() -> Finetuning:
    """HotpotQA as published, in two stages: --data FILE --test FILE; joint F1 64.4 in the paper."""
    columns = {"text": "context", "answers": "answer", "evidence": "supporting_facts", "id": "_id"}
    return Finetuning(
        name="hotpotqa",
        task="multihop",
        measure="joint_f1",
        data=Examples(columns=columns),
        hops=Hops(stages=2),
        epochs=5.0,
        learning_rate=5e-5,
        warmup=1000.0,
        too_long="split",
        packed=False,
        evaluation=Checks(batch=16),
    )
