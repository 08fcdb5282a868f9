"""What all sections of a configuration have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Unknown keys are errors, and the text under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
