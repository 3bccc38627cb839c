"""One page about a training, and a trace of a run.

How a page is made: `read_inputs` reads files into `inputs.Inputs`, `inputs.forecast_for` predicts what can be
predicted from them, the modules in `sections` turn both into sections with charts, and `page` adds the top of the page
and writes the HTML.
"""
