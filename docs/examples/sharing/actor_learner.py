"""An actor and a learner. The actor plays with the learner's policy, whose memory it shares, and
sends its episodes. An event of both processes says when the policy may be read."""

import torch
import torch.multiprocessing as mp

DEVICE = "openreg:0"
ROUNDS = 30


def act(policies, episodes):
    torch.manual_seed(1)
    logits, updated = policies.get()
    for _ in range(ROUNDS):
        updated.wait()
        choices = torch.distributions.Categorical(logits=logits.detach()).sample((64,))
        rewards = (choices == 2).float()  # the third of four arms pays
        episodes.put((choices, rewards))
    policies.get()  # the learner has the last episode: this process may end


def learn(context):
    logits = torch.zeros(4, device=DEVICE, requires_grad=True)
    updated = torch.openreg.Event(interprocess=True)
    policies, episodes = context.SimpleQueue(), context.SimpleQueue()
    actor = context.Process(target=act, args=(policies, episodes))
    actor.start()
    policies.put((logits, updated))
    optimizer = torch.optim.SGD([logits], 1.0)
    for _ in range(ROUNDS):
        choices, rewards = episodes.get()
        taken = torch.log_softmax(logits, 0)[choices]
        loss = -((rewards - rewards.mean()) * taken).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updated.record()
    policies.put(None)
    actor.join()
    return torch.softmax(logits, 0)


if __name__ == "__main__":
    chances = learn(mp.get_context("spawn"))
    print(f"chances {[round(chance, 2) for chance in chances.tolist()]}")
    assert chances.argmax().item() == 2
