"""Losses of post-training, as functions of log-probabilities.

`Step.logprobs` gives log-probabilities of tokens, [batch, tokens], 0 at tokens without a label;
`sums` and `means` are over a row. Each loss is a tensor whose `backward()` trains; references and
old policies have no gradient. Losses that TRL also has are equal to TRL's (tests/test_losses.py).
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

Pair = tuple[Tensor, Tensor]  # chosen answers and rejected answers, [n] each


def sums(logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return sums [batch] over each row's tokens: all of them, or those where `mask` is not 0."""
    return (logprobs if mask is None else logprobs * mask).sum(1)


def means(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return means over each row's tokens where `mask` is not 0, [batch]; 0 for empty rows."""
    return sums(logprobs, mask) / mask.sum(1).clamp(min=1)


def dpo(
    policy: Pair, reference: Pair, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> Tensor:
    """Return DPO's loss [n], -log sigmoid(beta * margin) (Rafailov et al. 2023, arXiv 2305.18290,
    equation 7). The margin is how much more the policy prefers the chosen answer than the reference
    does.

    Args:
        policy: Sums of log-probabilities over chosen and over rejected answers, [n] each; means
            give the length-normalised loss.
        reference: The same of the reference model, without gradients.
        beta: Factor of the margin.
        label_smoothing: Assumed share of swapped pairs.
    """
    margin = beta * _margin(policy, reference)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo(policy: Pair, reference: Pair, *, beta: float = 0.1) -> Tensor:
    """Return IPO's loss [n], (margin - 1 / (2 beta))^2, with the margin of `dpo` (Azar et al. 2023,
    arXiv 2310.12036, equation 17). Arguments are means over answers."""
    return (_margin(policy, reference) - 1 / (2 * beta)).square()


def orpo(policy: Pair, *, beta: float = 0.1) -> Tensor:
    """Return ORPO's loss [n], -beta log sigmoid of the log odds ratio of the two answers (Hong et
    al. 2024, arXiv 2403.07691, equations 6 and 7). `policy` has means over answers, below 0. The
    paper adds the chosen answer's mean loss, `-policy[0]`."""
    chosen, rejected = policy
    odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return -beta * logsigmoid(odds)


def kto(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    kl: Tensor | float,
    *,
    beta: float = 0.1,
    weights: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Return KTO's loss [n] for single answers (Ethayarajh et al. 2024, arXiv 2402.01306, equation
    7).

    Args:
        policy: Sums of log-probabilities over answers, [n].
        reference: The same of the reference model, without gradients.
        desirable: Whether each answer is desirable, [n].
        kl: Mean log-ratio of answers to other prompts, at least 0, without a gradient.
        beta: Factor of log-ratios.
        weights: Factors of the losses of desirable and of undesirable answers.
    """
    desirable, ratio = desirable.bool(), policy - reference
    good = weights[0] * (1 - torch.sigmoid(beta * (ratio - kl)))
    return torch.where(desirable, good, weights[1] * (1 - torch.sigmoid(beta * (kl - ratio))))


def grpo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    reference: Tensor | None = None,
    beta: float = 0.0,
) -> Tensor:
    """Return GRPO's loss, a scalar: PPO's clipped surrogate, plus beta times an unbiased estimate
    of the KL divergence from a `reference` (Shao et al. 2024, arXiv 2402.03300, equations 3 and 4).
    It is the mean over rows of means over tokens.

    Args:
        logprobs: Log-probabilities of the policy, [batch, tokens].
        old: Those of the policy that wrote the answers, [batch, tokens], without gradients.
        advantages: Advantage of each answer within its group, [batch].
        mask: Tokens that count, [batch, tokens]: not 0.
        clip: Ratios are clipped to between 1 - clip[0] and 1 + clip[1].
        reference: Log-probabilities of the reference model, [batch, tokens]; None: no such term.
        beta: Factor of the KL divergence.
    """
    ratio, gain = (logprobs - old).exp(), advantages[:, None]
    losses = -torch.minimum(ratio * gain, ratio.clamp(1 - clip[0], 1 + clip[1]) * gain)
    if reference is not None and beta:
        apart = reference - logprobs
        losses = losses + beta * (apart.exp() - apart - 1)
    return means(losses, mask).mean()


def distillation(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the part of KL(teacher || student) that comes from the teacher's k likeliest ids, per
    token, [batch, tokens]. Arguments are log-probabilities [batch, tokens, k]; the result is 0
    where `mask` is. For a token with fewer than k ids, the teacher has -inf at the rest."""
    weight = teacher.exp()
    loss = torch.where(weight > 0, weight * (teacher - student), 0).sum(-1)
    return loss if mask is None else loss * mask


def _margin(policy: Pair, reference: Pair) -> Tensor:
    return (policy[0] - policy[1]) - (reference[0] - reference[1])


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, by whichever of two formulas is accurate for x."""
    near = x > -0.6931  # where exp(x) > 1/2
    far = torch.log1p(-torch.where(near, -1.0, x).exp())
    return torch.where(near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), far)
