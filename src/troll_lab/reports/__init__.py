"""Pages about runs: matplotlib draws, Jinja2 fills in the templates. A page is one HTML file that needs no other.

Importing this package takes half a second and the extra `report`, so a command imports it when it writes a page.
"""

try:
    import jinja2  # noqa: F401
    import matplotlib  # noqa: F401
    import pandas  # noqa: F401
    import scipy  # noqa: F401
except ImportError as error:
    raise ImportError(f'the report needs {error.name}: pip install "troll-rl[report]"') from error
