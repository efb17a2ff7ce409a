"""Roles: an engine with a name and endpoints that the controller may call.

    policy        generate, greedy, logprobs, update, publish
    reference     logprobs
    critic        values, update
    reward        score
    reward model  score, prefer: of a reward or of a cost

Every endpoint takes and returns batches; a role names the fields it adds.
"""
