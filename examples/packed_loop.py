"""Train on answers that begin alike in a loop of your own: each beginning is computed once, and nothing is padded."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from python_trainer.model.hub import policy_folder
from rlkernels import linear_token_logprobs
from rlkernels.integrations.transformers import pack

name = policy_folder("small")  # a tiny shipped policy; write your own folder or Hub id
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="rlkernels", dtype="float32")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
prompt, *answers = (tokenizer(text).input_ids for text in ("12+30=", "A:42", "A:41", "A:4"))
advantages = torch.tensor([1.0, -0.5, -0.5])
scored = [[False] * len(prompt) + [True] * len(answer) for answer in answers]

for step in range(3):
    packed = pack([prompt + answer for answer in answers], scored)
    inputs = {"position_ids": packed.position_ids[None], "attention": packed.layout, "use_cache": False}
    hidden = model.base_model(packed.ids[None], **inputs).last_hidden_state[0]
    logprobs = linear_token_logprobs(hidden[packed.rows], model.get_output_embeddings().weight, packed.targets)
    weights = advantages.repeat_interleave(torch.tensor([len(answer) for answer in answers]))
    loss = -(logprobs[packed.pairs] * weights).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}, {len(packed.ids)} tokens instead of {sum(map(len, scored))}")
