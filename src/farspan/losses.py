"""Losses of post-training, as functions of log-probabilities.

`Step.logprobs` gives those of tokens, [batch, tokens], 0 where no label is; `sums` and `means` are
over a row. Each loss is a tensor whose `backward()` trains; references and old policies are
given without a gradient. Where TRL has the loss, it is the same number (tests/test_losses.py).
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

Pair = tuple[Tensor, Tensor]  # of the chosen answers and of the rejected ones, [n] each


def sums(logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Of each row, [batch]: of tokens where `mask`, [batch, tokens], is not 0; of all if None."""
    return (logprobs if mask is None else logprobs * mask).sum(1)


def means(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Of each row, [batch], over tokens where `mask` is not 0; 0 of a row that has none."""
    return sums(logprobs, mask) / mask.sum(1).clamp(min=1)


def dpo(
    policy: Pair, reference: Pair, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> Tensor:
    """[n]: -log sigmoid of beta times how much more the policy prefers the chosen answer than the
    reference does (Rafailov et al. 2023, arXiv 2305.18290, equation 7), of sums over answers; of
    means it is length-normalised. `label_smoothing` is the share of pairs taken for swapped."""
    margin = beta * _margin(policy, reference)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo(policy: Pair, reference: Pair, *, beta: float = 0.1) -> Tensor:
    """[n]: the square by which that preference misses 1 / (2 beta) (Azar et al. 2023, arXiv
    2310.12036, equation 17), of means over answers."""
    return (_margin(policy, reference) - 1 / (2 * beta)).square()


def orpo(policy: Pair, *, beta: float = 0.1) -> Tensor:
    """[n]: -beta log sigmoid of the log odds ratio of the two answers (Hong et al. 2024, arXiv
    2403.07691, equations 6 and 7), of means over answers, which are below 0. The paper adds the
    chosen answer's mean loss, `-policy[0]`."""
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
    """[n], of sums over single answers (Ethayarajh et al. 2024, arXiv 2402.01306, equation 7).
    `desirable` [n] says which are; `kl` is the mean log-ratio of answers to other prompts, without
    a gradient, at least 0; `weights` are of desirable and of undesirable answers."""
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
    """A scalar: PPO's clipped surrogate of tokens with the group's advantages [batch], plus beta
    times an unbiased estimate of the KL divergence from a `reference` (Shao et al. 2024, arXiv
    2402.03300, equations 3 and 4): the mean over rows of means over tokens where `mask` is not 0.
    `logprobs`, `old`, `reference` and `mask` are [batch, tokens]; ratios stay between 1 - clip[0]
    and 1 + clip[1]."""
    ratio, gain = (logprobs - old).exp(), advantages[:, None]
    losses = -torch.minimum(ratio * gain, ratio.clamp(1 - clip[0], 1 + clip[1]) * gain)
    if reference is not None and beta:
        apart = reference - logprobs
        losses = losses + beta * (apart.exp() - apart - 1)
    return means(losses, mask).mean()


def distillation(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """[batch, tokens]: the part of KL(teacher || student) that lies in the teacher's k ids, of
    log-probabilities [batch, tokens, k]; 0 where `mask` is. Of ids that are no part of a token's k
    the teacher's log-probability is -inf."""
    weight = teacher.exp()
    found = torch.where(weight > 0, weight * (teacher - student), 0).sum(-1)
    return found if mask is None else found * mask


def _margin(policy: Pair, reference: Pair) -> Tensor:
    return (policy[0] - policy[1]) - (reference[0] - reference[1])


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x < 0, by the form that keeps its digits."""
    near = x > -0.6931  # where exp(x) > 1/2
    far = torch.log1p(-torch.where(near, -1.0, x).exp())
    return torch.where(near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), far)
