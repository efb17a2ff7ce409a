"""Ray reads its protection when it is imported: tests that import it do so as a driver does."""

from __future__ import annotations

from rillflow.workers.start import settle

settle()
