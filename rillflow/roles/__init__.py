"""Roles: an engine with a name and endpoints that the controller may call.

    policy        generate, greedy, logprobs, totals, update, publish
    reference     logprobs, totals, follow
    critic        values, final_values, update
    reward        score
    reward model  score, update: of a reward or of a cost
    judge         score, update

Endpoints take batches and return batches, metrics or a number; a role names the fields that it adds.
"""
