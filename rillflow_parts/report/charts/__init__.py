"""Charts: the scripts, the style sheet and the chart library that the report and ``rillflow watch`` share.

vendor/uPlot.iife.min.js     uPlot 1.6.32, as published, with its licence
dom, numbers, series, heat, chart, controls, tokens, timeline      modules of plain JavaScript
"""
