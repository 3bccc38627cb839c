"""One page about a training, and a trace of a run.

How a page is made: `read_inputs` reads files into `inputs.Inputs`, `forecast` predicts what can be predicted from them,
the modules in `sections` turn both into sections with charts, `summary` writes the top of the page, and `page` puts it
all together and writes the HTML.

A new chart goes into the function in `sections` that makes its section; a new section is a new function there and one
entry in `sections/__init__.py`. Build charts from `charts.Bars`, `charts.Lines` or `charts.Table`: `charts.html.j2`
draws them, `page.html.j2` is the page, and `page.css` has the colours for light and dark.
"""
