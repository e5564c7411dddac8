"""Soft actor-critic for small continuous control tasks, the learner of `mmbuf demo`.

After Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv:1812.05905):
twin critics, a squashed Gaussian policy, a temperature that is learned. Actions live in
`[-1, 1]`; the scale of the environment's own is the caller's business. Rewards are scaled here, so
that a store holds them as they were.

Shapes: K rows of a batch, B environments, S numbers of a state, A of an action.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

LOG_STD_RANGE = (-5.0, 2.0)


@dataclass(frozen=True)
class Policy:
    """The actor of one moment, in NumPy.

    It never changes, so a trainer may hand it to other threads while the actor learns on; and a
    small network on a few rows is several times faster in NumPy than in torch.
    """

    version: int
    layers: tuple[tuple[NDArray[np.float32], NDArray[np.float32]], ...]

    def act(self, states: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
        """Draw actions `[B, A]` in `[-1, 1]` for the states `[B, S]`."""
        hidden = states
        for weight, bias in self.layers[:-1]:
            hidden = np.maximum(hidden @ weight + bias, 0.0)
        weight, bias = self.layers[-1]
        mean, log_std = np.split(hidden @ weight + bias, 2, axis=-1)
        noise = rng.standard_normal(mean.shape, dtype=np.float32)
        actions: NDArray[np.float32] = np.tanh(
            mean + np.exp(np.clip(log_std, *LOG_STD_RANGE)) * noise
        )
        return actions


class Actor(nn.Module):
    """States `[K, S]` to a squashed Gaussian over actions."""

    def __init__(self, num_states: int, num_actions: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(num_states, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, 2 * num_actions)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions `[K, A]`, differentiably, with their log probabilities `[K, 1]`."""
        hidden = functional.relu(self.second(functional.relu(self.first(states))))
        mean, log_std = self.last(hidden).chunk(2, dim=-1)
        log_std = log_std.clamp(*LOG_STD_RANGE)
        noise = torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        # The log of the slope of tanh, in the form that keeps its digits where tanh saturates.
        log_prob = log_prob - 2 * (math.log(2) - raw - functional.softplus(-2 * raw))
        return torch.tanh(raw), log_prob.sum(-1, keepdim=True)


class TwinCritic(nn.Module):
    """Two critics that share nothing but their calls: each layer is one batched product."""

    def __init__(self, num_inputs: int, hidden: int) -> None:
        super().__init__()
        self.first_weight, self.first_bias = self._layer(num_inputs, hidden)
        self.second_weight, self.second_bias = self._layer(hidden, hidden)
        self.last_weight, self.last_bias = self._layer(hidden, 1)

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:
        """Return both values `[2, K, 1]` of the actions in the states."""
        inputs = torch.cat((states, actions), dim=-1).expand(2, -1, -1)
        hidden = torch.baddbmm(self.first_bias, inputs, self.first_weight).relu()
        hidden = torch.baddbmm(self.second_bias, hidden, self.second_weight).relu()
        return torch.baddbmm(self.last_bias, hidden, self.last_weight)

    @staticmethod
    def _layer(num_inputs: int, num_outputs: int) -> tuple[nn.Parameter, nn.Parameter]:
        bound = 1 / math.sqrt(num_inputs)
        weight = torch.empty(2, num_inputs, num_outputs).uniform_(-bound, bound)
        return nn.Parameter(weight), nn.Parameter(torch.zeros(2, 1, num_outputs))


class SAC:
    """The learner: `learn` from batches of rows, `policy` for whoever collects them."""

    def __init__(
        self,
        num_states: int,
        num_actions: int,
        *,
        hidden: int = 64,
        learning_rate: float = 3e-3,
        gamma: float = 0.98,
        target_rate: float = 0.03,
        reward_scale: float = 0.1,
    ) -> None:
        self.gamma = gamma
        self.target_rate = target_rate
        self.reward_scale = reward_scale
        self.target_entropy = -float(num_actions)
        self.num_updates = 0
        self.actor = Actor(num_states, num_actions, hidden)
        self.critic = TwinCritic(num_states + num_actions, hidden)
        self.slow_critic = TwinCritic(num_states + num_actions, hidden)
        self.slow_critic.load_state_dict(self.critic.state_dict())
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.critic_optimizer = torch.optim.Adam(
            self.critic.parameters(), learning_rate, fused=True
        )
        self.actor_optimizer = torch.optim.Adam(
            [*self.actor.parameters(), self.log_temperature], learning_rate, fused=True
        )

    def learn(
        self,
        states: Tensor,
        actions: Tensor,
        rewards: Tensor,
        next_states: Tensor,
        terminations: Tensor,
    ) -> None:
        """Take one step on K rows, each tensor `[K, ...]`.

        An episode that was cut off has no termination: its last state still has a value.
        """
        temperature = self.log_temperature.detach().exp()
        with torch.no_grad():
            next_actions, log_prob = self.actor(next_states)
            next_value = self.slow_critic(next_states, next_actions).amin(0)
            next_value -= temperature * log_prob
            target = self.reward_scale * rewards + self.gamma * ~terminations * next_value
        loss = (self.critic(states, actions) - target).square().mean(1).sum()
        _step(self.critic_optimizer, loss)

        self.critic.requires_grad_(False)
        new_actions, log_prob = self.actor(states)
        value = self.critic(states, new_actions).amin(0)
        surprise = log_prob.detach().mean() + self.target_entropy
        loss = (temperature * log_prob - value).mean() - self.log_temperature * surprise
        _step(self.actor_optimizer, loss)
        self.critic.requires_grad_(True)

        pairs = zip(self.slow_critic.parameters(), self.critic.parameters(), strict=True)
        with torch.no_grad():
            for slow, fast in pairs:
                slow.lerp_(fast, self.target_rate)
        self.num_updates += 1

    def policy(self) -> Policy:
        """Return a copy of the actor of this moment, numbered by the updates that made it."""
        layers = tuple(
            (layer.weight.detach().numpy().T.copy(), layer.bias.detach().numpy().copy())
            for layer in (self.actor.first, self.actor.second, self.actor.last)
        )
        return Policy(self.num_updates, layers)


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
