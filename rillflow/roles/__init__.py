"""Roles: an engine given a name and endpoints the controller may call.

    policy     generate, logprobs, update, imitate, publish
    reference  logprobs
    reward     score

Every endpoint takes and returns batches; a role names the fields it adds.
"""
