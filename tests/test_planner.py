"""The planner: what the page, the command, the live widget and ``choose`` say is one thing, and its code runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
import torch
from browser import Visit
from drawing import drawn
from torch._subclasses.fake_tensor import FakeTensorMode

from laga_core import MLAAttention, MLAConfig, communication, shard_sequence
from laga_core.__main__ import main
from laga_core.charts import live, planner
from laga_core.costs import Cost, FormChoice, Machine, choose, cost
from laga_core.costs.choice import code
from laga_core.experiments.communication import crossover
from laga_core.forms import STRONG_EXPLICIT, check_form
from laga_core.memory.fake import fake_group

V3 = MLAConfig.preset("deepseek-v3")
PAGE = "book/planner.html"
BOOK = Path(__file__).resolve().parent.parent / "book"
OWN = {"hidden_size": 4096, "num_attention_heads": 40, "q_lora_rank": 0, "kv_lora_rank": 64, "v_head_dim": 256}

SETTINGS: list[dict[str, Any]] = [
    {},
    {"memory": 192},
    {"memory": 1},
    {"memory": 12, "far": 100},
    {"model": "kimi-k2", "seq": 131072, "sp": 64, "layers": 10},
    {"model": "paper-v3", "seq": 16384, "sp": 8, "layers": 4},
    {"model": "deepseek-v2-lite", "sp": 32, "layers": 27, "batch": 4},
    {"model": "minicpm3-4b", "seq": 4096, "sp": 8, "node": 4, "near": 300},
    {"model": "deepseek-v2", "seq": 1048576, "sp": 128, "layers": 4, "tflops": 1000, "attention": 600},
    {"sp": 128, "node": 128, "near": 25, "seq": 131072, "layers": 4},  # many ranks, one speed: plain explicit
    {"sp": 1, "layers": 1, "seq": 4096},
    {"sp": 16, "node": 1, "far": 0.25, "layers": 2},
    {"model": "own", "sp": 8, **OWN},
    {"model": "own", "sp": 16, "kv_lora_rank": 512, "q_lora_rank": 768, "hidden_size": 2560},
]


def expected(setting: dict[str, Any]) -> FormChoice:
    given = dict(setting)
    name = given.pop("model", "deepseek-v3")
    own = {key: given.pop(key) for key in list(given) if hasattr(V3, key)}
    config = own_config(own) if name == "own" else MLAConfig.preset(name)
    return planner.planned(config, **given)


def own_config(own: dict[str, Any]) -> MLAConfig:
    sizes = {s.name: getattr(V3, s.name) for s in planner.OWN} | own
    return MLAConfig(**{**sizes, "q_lora_rank": sizes["q_lora_rank"] or None})


def controls(setting: dict[str, Any]) -> dict[str, Any]:
    """The setting by the names of the page's controls."""
    return {f"own_{key}" if hasattr(V3, key) else key: value for key, value in setting.items()}


def si(size: float) -> str:
    """Three digits and a unit: 1.23 GB."""
    power = next(p for p in (12, 9, 6, 3, 0) if size >= 0.9995 * 10**p)
    digits = 2 if (scaled := size / 10**power) < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{digits}f} {'' if power == 0 else ' kMGT'[power // 3]}B"


# --- the page ---


@pytest.fixture(scope="module")
def chart() -> dict[str, Any]:
    return planner.planner().to_dict()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_page_weighs_as_choose_does(chart: dict[str, Any], setting: dict[str, Any]) -> None:
    svg, texts = drawn(chart, **controls(setting))
    found, layers = expected(setting), setting.get("layers", planner.START["layers"])
    assert f"{found.best}: recommended" in texts
    assert {text.removesuffix(": recommended") for text in texts} >= {str(each) for each in found.contenders}
    assert sum(text.endswith((" kept", " do not fit")) for text in texts) == len(found.contenders)
    assert not re.search(r"NaN|undefined|null", svg)
    for each in found.contenders:
        ms = 1e3 * each.seconds
        sent = f"{si(each.sent_bytes)} sent" if each.sent_bytes else "nothing sent"
        outside = f", {si(each.inter_node_bytes)} between nodes" if each.inter_node_bytes else ""
        fits = "kept" if each in found.fitting else "do not fit"
        assert f"{ms:,.2f} ms" in texts or f"{ms:,.1f} ms" in texts, each
        assert f"{sent}{outside}; {si(layers * each.saved_bytes)} {fits}" in texts, each


def test_settings_reach_every_outcome() -> None:
    """What the settings above are good for: each sentence of a reason is said, and several kinds of member win."""
    reasons = [expected(setting).reason for setting in SETTINGS]
    for said in ("strong explicit:", "the paper's explicit:", "R = ", "query latent", "recompute", "nothing fits",
                 "would be quicker", "times as long", "take the plainer"):  # fmt: skip
        assert any(said in reason for reason in reasons), said


@pytest.mark.browser
def test_the_page_tells_why_and_gives_code(open_page: Callable[..., Visit]) -> None:
    """In a browser: reason, code and figures are choose's, at settings taken from the address."""
    for setting in (SETTINGS[4], SETTINGS[9], SETTINGS[-1]):
        query = "&".join(f"planner.{name}={value}" for name, value in controls(setting).items())
        seen = open_page(f"{PAGE}?{query}" if query else PAGE)
        found, answer = expected(setting), seen.chart("planner").root.locator(".laga-answer")
        assert answer.locator("p").inner_text() == found.reason
        name = setting.get("model", "deepseek-v3")
        own = {key: value for key, value in setting.items() if hasattr(V3, key)}
        built = built_from(answer.locator("pre").inner_text(), setting.get("sp", planner.START["sp"]))
        assert built.config == (own_config(own) if name == "own" else MLAConfig.preset(name))
        assert (built.form, built.form_options) == completed(found, built.config, setting)
        rows = {row["member"]: row for row in seen.chart("planner").rows()}
        for each in found.contenders:
            row, layers = rows[str(each)], setting.get("layers", planner.START["layers"])
            figures = (1e3 * each.seconds, each.sent_bytes / 1e6, each.inter_node_bytes / 1e6,
                       layers * each.saved_bytes / 1e9)  # fmt: skip
            named = (float(row[key]) for key in ("ms", "sent_mb", "between_nodes_mb", "kept_gb"))
            assert tuple(named) == pytest.approx(figures, rel=1e-9)
            assert row["recommended"] == str(each is found.contenders[0]).lower()
            assert row["fits"] == str(each in found.fitting).lower()
        assert seen.problems == []


@pytest.mark.browser
def test_the_answer_follows_the_controls_and_can_be_copied(open_page: Callable[..., Visit]) -> None:
    seen = open_page(PAGE, width=390)
    seen.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chart, answer = seen.chart("planner"), seen.chart("planner").root.locator(".laga-answer")
    still = (answer.locator("p").inner_text(), answer.locator("pre").inner_text())
    assert still == tuple(planner.planner().usermeta["answer"].values())  # nothing moves when scripts take over
    slider = chart.control("kv_lora_rank").locator("input")
    assert not slider.is_visible()
    chart.set("Model", "own dimensions")
    assert slider.is_visible()
    slider.focus()
    seen.page.keyboard.press("Home")
    chart.settle()
    least = planner.OWN[planner.KV_LORA][0]
    assert answer.locator("p").inner_text() == planner.planned(own_config({"kv_lora_rank": least})).reason
    assert f"kv_lora_rank={least}" in answer.locator("pre").inner_text()
    button = answer.locator("button")
    assert float(button.evaluate("each => getComputedStyle(each).opacity")) == 1
    button.focus()
    seen.page.keyboard.press("Enter")
    seen.page.wait_for_function("navigator.clipboard.readText().then(text => text.startsWith('layer = '))")
    assert seen.page.evaluate("navigator.clipboard.readText()") == answer.locator("pre").inner_text()
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390


# --- the code ---


TOY = MLAConfig.preset("toy")


def built_from(text: str, sp: int, tokens: int = 256) -> MLAAttention:
    """The layer that the text makes on one of ``sp`` ranks; where it is the toy's, after a forward on its tokens."""
    with fake_group(sp) as group, FakeTensorMode():
        hidden = torch.empty(1, tokens, TOY.hidden_size)
        names: dict[str, Any] = {"MLAAttention": MLAAttention, "MLAConfig": MLAConfig, "shard_sequence": shard_sequence}
        exec(text, names := names | {"group": group, "hidden": hidden})
        mine = names["hidden"]
        if mine is hidden:  # contiguous shards are the reader's own business
            mine = shard_sequence(hidden, group)
        assert mine.shape == (1, tokens // sp, TOY.hidden_size)
        assert names["layer"].config != TOY or names["layer"](mine).shape == mine.shape
        return names["layer"]


def completed(found: FormChoice, config: MLAConfig, setting: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    sp = setting.get("sp", planner.START["sp"])
    return found.form, check_form(config, sp, found.form, found.options)


@pytest.mark.parametrize(("sp", "kinds"), [(8, 11), (16, 4)])  # as many ranks as heads, and more
def test_the_code_of_every_contender_runs(sp: int, kinds: int) -> None:
    contenders = planner.planned(TOY, sp=sp).contenders
    assert len(contenders) == kinds
    for each in contenders:
        text = code(each.form, each.options, planner.preset("toy"))
        layer = built_from(text, sp)
        assert (layer.config, layer.form, layer.kernel) == (TOY, each.form, "auto")
        assert layer.form_options == check_form(TOY, sp, each.form, each.options)
        assert ("shard_sequence" in text) == ("layout" in each.options)


# --- the command ---

JOB = ["--model", "deepseek-v3", "--seq", "131072", "--sp", "16"]


def test_the_command_says_what_choose_says(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(150e12, 60e9, 11e9, 8, 100e12, memory=40e9)  # a typical NPU's
    found = choose(V3, 131072, 16, machine, 30, "zigzag")
    arguments = ["plan", *JOB, "--layers", "30", "--memory", "40", "--ranks-per-node", "8"]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["reason"]) == ("derived", found.reason)
    assert (told["best"]["form"], told["best"]["options"]) == (found.form, found.options)
    assert [each["member"] for each in told["members"]] == [str(each) for each in found.weighed]
    assert told["best"]["seconds"] == found.best.seconds and told["best"]["fits"]
    built_from(told["code"], 16)
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert all(str(each) in text for each in found.contenders)
    assert found.reason in text and told["code"] in text and "does not fit" in text


def test_the_command_takes_a_machine_and_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = {s.name: getattr(V3, s.name) for s in planner.OWN}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    rates = ["--rate", "300", "--attention-rate", "200", "--node-link", "100", "--slow-link", "2", "--latency", "10"]
    assert main(["plan", "--model", str(tmp_path), *JOB[2:], *rates, "--layout", "contiguous", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    machine = Machine(300e12, 100e9, 2e9, 8, 200e12, latency=10e-6)
    assert told["reason"] == choose(V3, 131072, 16, machine).reason
    assert "shard_sequence" not in told["code"] and "from_hf" in told["code"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sp", "0"], "sp must be a whole number of at least 1"),
        (["--sp", "12"], "does not divide"),
        (["--sp", "7", "--ranks-per-node", "7"], "no form can share 128 heads"),
        (["--seq", "1000"], "cannot be split evenly"),
        (["--layers", "0"], "layers must be a whole number"),
        (["--device", "tpu"], "no typical machine"),
        (["--memory", "-1"], "memory must be a positive number"),
        (["--model", "gpt"], "unknown preset"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *JOB, *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


# --- live ---


def test_the_live_planner_calls_choose() -> None:
    box = live.planner()
    named, shown = {control.description: control for control in box.children[:-1]}, box.children[-1]
    assert planner.planned(V3).reason in shown.value.replace("&#x27;", "'")
    named["ranks"].value, named["memory, GB"].value = 8, 20
    found = planner.planned(V3, sp=8, memory=20)
    assert f"<p>{found.reason}" in shown.value.replace("&#x27;", "'")
    assert shown.value.count("<td>") == 2 * len(found.contenders)  # names, and whether it fits
    named["ranks"].value = 7
    assert "no form can share" in shown.value


# --- the cost model's edges ---


def test_absorbed_is_weighed_and_never_quickest_at_published_sizes() -> None:
    for name in planner.MODELS:
        for memory in (192, 12):
            weighed = planner.planned(MLAConfig.preset(name), sp=8, memory=memory)
            assert "absorbed" in [each.form for each in weighed.weighed] and weighed.form != "absorbed"


def test_one_rank_takes_the_plainest() -> None:
    found = planner.planned(V3, sp=1, layers=1, seq=4096)
    assert (found.form, found.options, found.best.sent_bytes) == ("explicit", {}, 0)


def test_bytes_are_those_of_both_directions() -> None:
    machine = Machine.typical("npu")
    for form, options in (("explicit", {}), ("absorbed", {}), ("laga", {"context": 2, "recompute": True})):
        found = cost(V3, form, 16384, 16, machine, **options)
        both = [communication(V3, form, 16384, 16, direction=d, ranks_per_node=8, **options)
                for d in ("forward", "backward")]  # fmt: skip
        assert found.sent_bytes == sum(each.total_bytes for each in both)
        assert found.inter_node_bytes == sum(each.inter_node_bytes or 0 for each in both)


# --- the chapter ---


def test_the_chapter_states_what_the_model_gives() -> None:
    text = " ".join((BOOK / "planner.md").read_text(encoding="utf-8").split())
    split = {"context": 2, "layout": "zigzag"}
    members = [("explicit", STRONG_EXPLICIT), ("laga", {}), ("laga", split), ("laga", {**split, "recompute": True})]
    machine = Machine.typical("npu")
    strong, plain, halves, again = (cost(V3, form, 32768, 16, machine, **options) for form, options in members)
    table = (strong, plain, halves)
    near, far = machine.node_link, machine.slow_link or 0
    rows: dict[str, Callable[[Cost], float]] = {
        "computing, ms": lambda c: 1e3 * c.compute,
        "in the node, MB": lambda c: (c.sent_bytes - c.inter_node_bytes) / 1e6,
        "... at 60 GB/s, ms": lambda c: 1e3 * (c.sent_bytes - c.inter_node_bytes) / near,
        "between nodes, MB": lambda c: c.inter_node_bytes / 1e6,
        "... at 11 GB/s, ms": lambda c: 1e3 * c.inter_node_bytes / far,
        "collectives, ms": lambda c: 1e3 * c.latency,
        "kept by 61 layers, GB": lambda c: 61 * c.saved_bytes / 1e9,
    }
    said = [f"| {name} | " + " | ".join(f"{of(each):.1f}" for each in table) + " |" for name, of in rows.items()]
    said.append("| **a layer, ms** | " + " | ".join(f"**{1e3 * each.seconds:.1f}**" for each in table) + " |")
    unfolding, crossing = halves.compute - plain.compute, plain.inter_node_bytes - halves.inter_node_bytes
    inside = (halves.sent_bytes - halves.inter_node_bytes - plain.sent_bytes + plain.inter_node_bytes) / near
    calls = halves.latency - plain.latency
    lite = MLAConfig.preset("deepseek-v2-lite")
    one_node, two_nodes = planner.planned(lite, sp=8), planner.planned(lite)
    opponent = next(each for each in two_nodes.weighed if each.form == "explicit")
    said += [
        f"there, {strong.inter_node_bytes / halves.inter_node_bytes:.0f} times less",
        f"takes {1e3 * unfolding:.1f} ms and {61 * (halves.saved_bytes - plain.saved_bytes) / 1e9:.0f} GB",
        f"another {1e3 * (again.compute - halves.compute):.1f} ms and keeps {61 * again.saved_bytes / 1e9:.1f} GB",
        f"costs {1e3 * unfolding:.1f} ms of computing, {1e3 * inside:.1f} ms in the node and {1e3 * calls:.2f} ms",
        f"saves {crossing / 1e6:.1f} MB between nodes. They take as long at "
        f"{crossing / (unfolding + inside + calls) / 1e9:.0f} GB/s",
        f"Laga sends {one_node.best.sent_bytes / 1e6:.1f} MB",
        f"still finds, {100 * (ratio(one_node) - 1):.0f} %",
        f"takes {ratio(two_nodes):.2f} times as long as $R = 2$: of its {opponent.sent_bytes / 1e6:.1f} MB "
        f"{opponent.inter_node_bytes / 1e6:.1f} go between nodes, where $R = 2$ sends "
        f"{two_nodes.best.inter_node_bytes / 1e6:.1f}",
        f"d_{{kv}} = {V3.num_attention_heads * (V3.qk_nope_head_dim + V3.v_head_dim) / V3.kv_lora_rank:.0f}$",
        f"equal at {crossover(V3):.0f} ranks",
    ]
    assert [each for each in said if each not in text] == []
    assert one_node.best.sent_bytes == next(c for c in one_node.weighed if c.options == STRONG_EXPLICIT).sent_bytes


def test_the_settings_that_the_chapter_links_to_give_what_it_says() -> None:
    text = (BOOK / "planner.md").read_text(encoding="utf-8")
    links = re.findall(r'href="\?([^"]+)"', text)
    many, fast, long = (
        planner.planned(V3, **{name.removeprefix("planner."): int(value) for name, value in parse_qsl(unescape(link))})
        for link in links
    )
    assert many.form == "explicit" and f"{ratio(many):.2f}" == "1.02"
    assert f"{ratio(fast):.2f}" == "1.01" and "take the plainer" in fast.reason
    assert ratio(long) < 1.015 and {"explicit", "laga"} <= {each.form for each in long.fitting}
    changes = [
        far for far in range(40 * 4, 60 * 4) if planner.planned(V3, memory=192, far=far / 4).options.get("context") != 2
    ]
    assert f"changes its mind at {changes[0] / 4} GB/s" in " ".join(text.split())


def ratio(found: FormChoice) -> float:
    """How many times as long the best of another form takes."""
    return next(each for each in found.fitting if each.form != found.form).seconds / found.best.seconds
