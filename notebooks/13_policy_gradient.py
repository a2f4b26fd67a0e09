# Databricks notebook source
# MAGIC %md
# MAGIC # Policy gradient on two workers
# MAGIC
# MAGIC Two workers learn to balance a pole. Each worker plays its own episodes of CartPole with the same
# MAGIC policy, and they all-reduce their gradients (REINFORCE with a baseline, Williams 1992). There is no
# MAGIC DataFrame: `ringspark.run` starts the function on the workers of the Spark cluster.
# MAGIC
# MAGIC Needs `ringspark` and `gymnasium` on the cluster (`%pip install ringspark gymnasium`).

# COMMAND ----------

import ringspark

WORKERS = 2
# CartPole-v1 ends an episode after 500 steps, each with a reward of 1. It counts as solved from 475 on.
SOLVED, LIMIT = 475, 500

# COMMAND ----------

# MAGIC %md
# MAGIC ## The function
# MAGIC
# MAGIC - `play` plays one episode per environment, 16 at a time. It returns states, actions, and the steps in
# MAGIC   which an episode was still running.
# MAGIC - The return of a step is the discounted sum of the rewards from this step on. A second network, the
# MAGIC   baseline, predicts it from the state.
# MAGIC - An action becomes more probable if its return exceeds the baseline. The workers all-reduce the sums
# MAGIC   of advantages and the gradients, so they take the same step as one worker that plays all episodes.

# COMMAND ----------


def learn(rounds, episodes=16, rate=0.02, discount=0.99):
    """Trains a policy; returns the mean return per round, the test's mean return, and a sum of weights."""
    import gymnasium
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # equal weights on all workers
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    baseline = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    weights = [*policy.parameters(), *baseline.parameters()]
    optimizer = torch.optim.Adam(weights, lr=rate)
    dice = torch.Generator().manual_seed(1 + rank)  # other actions on each worker
    games = gymnasium.make_vec("CartPole-v1", num_envs=episodes, vectorization_mode="vector_entry_point")

    def total(*values):
        """Returns the sums over all workers."""
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums.tolist()

    def play(seed, choose):
        """Plays one episode per environment; returns (steps, episodes, ...) and which steps count."""
        seen, _ = games.reset(seed=seed)
        running = np.ones(episodes, dtype=bool)
        states, actions, counts = [], [], []
        while running.any():
            states.append(torch.from_numpy(seen.copy()))
            counts.append(torch.from_numpy(running.copy()))
            with torch.no_grad():
                actions.append(choose(policy(states[-1])))
            seen, _, fell, over, _ = games.step(actions[-1].numpy())
            running &= ~(fell | over)
        return torch.stack(states), torch.stack(actions), torch.stack(counts)

    def draw(logits):
        return torch.multinomial(logits.softmax(1), 1, generator=dice).squeeze(1)

    history = []
    for number in range(rounds):
        states, actions, counts = play(1000 * number + rank, draw)
        returns, later = torch.zeros(counts.shape), torch.zeros(episodes)
        for step in reversed(range(len(counts))):
            returns[step] = later = counts[step] * (1 + discount * later)
        states, actions, returns = states[counts], actions[counts], returns[counts] * (1 - discount)
        expected = baseline(states).squeeze(1)
        advantages = (returns - expected).detach()
        steps, first, second = total(len(states), float(advantages.sum()), float(advantages.square().sum()))
        mean = first / steps
        advantages = (advantages - mean) / (second / steps - mean**2) ** 0.5
        chosen = policy(states).log_softmax(1).gather(1, actions[:, None]).squeeze(1)
        loss = ((expected - returns).square() - advantages * chosen).sum() / steps
        optimizer.zero_grad()
        loss.backward()
        for weight in weights:
            dist.all_reduce(weight.grad)  # sums of both workers' shares of the mean
        optimizer.step()
        history.append(steps / (episodes * workers))  # the reward of a step is 1
        if sum(history[-5:]) > 5 * 490:
            break
    _, _, counts = play(1_000_000 + rank, lambda logits: logits.argmax(1))
    tested = total(float(counts.sum()))[0] / (episodes * workers)
    dist.destroy_process_group()
    return history, tested, sum(float(weight.detach().double().sum()) for weight in weights)


# COMMAND ----------

results = ringspark.run(learn, 100, numWorkers=WORKERS)
history, tested, _ = results[0]
for number in range(0, len(history), 5):
    print(f"round {number + 1:3d}: mean return {history[number]:5.1f}")
print(f"mean return of the last 5 rounds: {sum(history[-5:]) / 5:.1f} of {LIMIT}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## The test
# MAGIC
# MAGIC `learn` ends with new episodes, in which it always takes the more probable action. Both workers have
# MAGIC the same weights, because both took the same steps.

# COMMAND ----------

print(f"mean return of {16 * WORKERS} new episodes: {tested:.1f} of {LIMIT}, solved from {SOLVED} on")
print(f"both workers have the same weights: {len({weights for _, _, weights in results}) == 1}")
