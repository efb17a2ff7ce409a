"""A column of every row: its sampled tokens. A reward gets num_sampled by name, and the rollouts have it."""

from rillflow.app.plugins import Plugin, RowColumn


def sampled(setting, rows):  # the sampler's RoleSetting; a batch of ended rows
    return [int(number) for number in rows.ragged("loss_mask").sums()]


PLUGIN = Plugin(columns={"num_sampled": RowColumn(path="counted:sampled", example=1)})
