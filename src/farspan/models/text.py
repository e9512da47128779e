"""What text meets of a model, and what is there for images alone."""

from collections.abc import Iterator

from torch import Tensor, nn
from transformers import PreTrainedModel

# Families that read padding wherever a token stands for an image, a video or a sound.
READ_AS_PADDING = ("gemma4", "gemma4_unified")
STANDS_FOR_OTHER = ("image_token_id", "video_token_id", "audio_token_id")


def reads_text_alone(model: PreTrainedModel) -> bool:
    """Whether the model has no part that text never meets: its configuration is that of text."""
    return model.config.get_text_config() is model.config


def text_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The modules that text passes, by name: of a model that also reads images, say, its decoder
    and its head."""
    decoder = model.get_decoder()
    if reads_text_alone(model) or decoder is None:
        yield from model.named_modules()
        return
    met = {id(module) for module in decoder.modules()}
    met |= {id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    yield from ((name, module) for name, module in model.named_modules() if id(module) in met)


def freeze_unmet(model: PreTrainedModel) -> None:
    """Turns off gradients that text cannot give: an optimizer would hold states for them."""
    met = {id(p) for _, module in text_modules(model) for p in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in met:
            parameter.requires_grad_(False)


def tokens_as_read(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """The tokens that are embedded, of the same shape: in text, too, some families read others
    than they are given."""
    config = model.config
    if config.model_type not in READ_AS_PADDING:
        return input_ids
    padding = config.get_text_config().pad_token_id
    for name in STANDS_FOR_OTHER:
        other = getattr(config, name, None)
        if other is not None:
            input_ids = input_ids.masked_fill(input_ids == other, padding)
    return input_ids
