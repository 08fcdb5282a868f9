from rich.console import Console

from python_trainer.keyed import prompt_order
from python_trainer.trainer import Trainer


def test_every_epoch_visits_each_prompt_once(make_config, tmp_path):
    prompts = Trainer(make_config(), tmp_path / "run", console=Console(quiet=True)).prompts
    first, second = ([key for _ in range(4) for key in prompts.draw(3)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(12)) and first != second
    assert first + second == prompt_order(0, 0, 24, 12) and prompts.state.prompts == 24
