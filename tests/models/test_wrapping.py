"""What may be wrapped, and what may happen to it afterwards: it works, or one line says what to do."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from asking import refusal
from tiny_models import ARCHITECTURES, build, prompt, tiny

from opt_tree import custom_generate
from opt_tree.decoder import Decoder
from opt_tree.methods.policies.static import Static
from opt_tree.models.causal_lm import CausalLM, UnsupportedModelError

CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dtype": (lambda model: model.float(), "was float64 on cpu when it was wrapped and is float32 on cpu now"),
    "device": (lambda model: model.to("meta"), "was float64 on cpu when it was wrapped and is float64 on meta now"),
    "training": (lambda model: model.train(), "is in training mode"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_changed_after_wrapping_is_refused_when_a_generation_begins(name):
    model = build(ARCHITECTURES["llama"]())
    decoder = Decoder(CausalLM(model), None, Static.empty())
    decoder.generate(prompt(5), 2)
    change, message = CHANGES[name]
    change(model)
    told = refusal(UnsupportedModelError, decoder.generate, prompt(5), 2)
    assert message in told and "LlamaForCausalLM" in told


def test_gradient_checkpointing_is_harmless_outside_training():
    model = build(ARCHITECTURES["llama"]())
    model.train()
    model.gradient_checkpointing_enable()
    expected = Decoder(CausalLM(tiny("llama")), None, Static.empty()).generate(prompt(9), 12).tokens
    assert Decoder(CausalLM(model), None, Static.empty()).generate(prompt(9), 12).tokens == expected


def test_a_data_parallel_model_and_what_is_no_model_are_refused():
    assert "Linear has no config" in refusal(UnsupportedModelError, CausalLM, torch.nn.Linear(2, 2))
    told = refusal(UnsupportedModelError, CausalLM, torch.nn.DataParallel(tiny("llama")))
    assert "DataParallel" in told and ".module" in told


@pytest.mark.slow
def test_a_compiled_model_is_recognised_through_the_door():
    """As it was wrapped, and as the one that generates."""
    model = tiny("llama")
    compiled = torch.compile(model)
    ids = torch.tensor([prompt(9)])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **options)
    with torch.compiler.set_stance("force_eager"):  # the wrapper is what matters here; compiling takes minutes
        for wrapped in (model, compiled):
            decoder = Decoder(CausalLM(wrapped), None, Static.empty())
            for generating in (model, compiled):
                torch.testing.assert_close(
                    generating.generate(ids, **options, custom_generate=custom_generate(decoder)), expected
                )


class TestPeft:
    def adapted(self, **options: Any) -> Any:
        peft = pytest.importorskip("peft")
        model = build(ARCHITECTURES["llama"]())
        if options:
            config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, **options)
        else:
            config = peft.LoraConfig(
                task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False
            )
        return peft.get_peft_model(model, config).double().eval()

    def test_an_adapter_is_recognised_through_the_door(self):
        adapted = self.adapted()
        ids = torch.tensor([prompt(9)])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
        expected = adapted.generate(input_ids=ids, **options)
        assert expected.tolist() != tiny("llama").generate(ids, **options).tolist()
        for wrapped in (adapted, adapted.get_base_model()):
            decoder = Decoder(CausalLM(wrapped), None, Static.empty())
            for generating in (adapted, adapted.get_base_model()):
                result = generating.generate(input_ids=ids, **options, custom_generate=custom_generate(decoder))
                torch.testing.assert_close(result, expected)

    def test_a_text_goes_on_with_the_adapters_that_are_at_work_now(self):
        """To switch, disable or scale an adapter changes no weight, and the rows of the text before are not its own."""
        adapted = self.adapted()
        adapted.add_adapter("other", copy.deepcopy(adapted.peft_config["default"]))
        decoder = Decoder(CausalLM(adapted.double()), None, Static.empty())
        layer = adapted.base_model.model.model.layers[0].self_attn.q_proj

        def goes_on(text: list[int]) -> bool:
            """Decode behind a text, whose rows are kept where the model is the same; return whether they were."""
            found = decoder.generate(text, 8, reuse=True)
            assert found.tokens == Decoder(CausalLM(adapted), None, Static.empty()).generate(text, 8).tokens
            text += found.tokens
            return found.reused > 0

        text = prompt(9)
        goes_on(text)
        for switch in (
            lambda: adapted.set_adapter("other"),
            lambda: layer.set_scale("other", 3.0),
            lambda: adapted.base_model.disable_adapter_layers(),
            lambda: adapted.base_model.enable_adapter_layers(),
        ):
            assert goes_on(text), "nothing has changed"
            switch()
            assert not goes_on(text)

    def test_virtual_tokens_are_refused(self):
        adapted = self.adapted(token_dim=32, num_transformer_submodules=1, num_layers=2, num_attention_heads=4)
        ids = torch.tensor([prompt(9)])
        assert "virtual tokens" in refusal(UnsupportedModelError, CausalLM, adapted)
        decoder = Decoder(CausalLM(adapted.get_base_model()), None, Static.empty())
        how = {"input_ids": ids, "max_new_tokens": 5, "custom_generate": custom_generate(decoder)}
        assert "virtual tokens" in refusal(ValueError, adapted.generate, **how)
