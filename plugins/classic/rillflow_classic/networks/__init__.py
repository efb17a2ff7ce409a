"""Networks of policies: MLP, CNN and LSTM, with heads for discrete and continuous actions."""
