// Terms: what the words beside a rollout mean, shown under the pointer.

export const TERMS = {
  row: "epoch: pass over the data; prompt: its number in the data; sample: which of the prompt's answers",
  advantage: "how much better the reward is than that of the prompt's other answers; the update is weighted by it",
  version: "number of weight updates before the tokens were sampled",
};
