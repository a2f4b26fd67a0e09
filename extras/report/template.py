"""The page as a jinja2 template. It is a Python string, so that the wheel and the zip file contain it.

jinja2 escapes all text except our own SVG. The page tells the browser to load nothing from the network.
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { --ink: #1a202c; --soft: #5a6577; --line: #dde3ea; --back: #f6f8fa; --accent: #2b6cb0; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #fff; line-height: 1.45;
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 28px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 36px 0 10px; padding-top: 10px; border-top: 1px solid var(--line); }
p { margin: 8px 0; max-width: 90ch; overflow-wrap: anywhere; }
.soft, .note, figcaption { color: var(--soft); font-size: 13px; }
.warns { border-left: 3px solid #c53030; background: #fff5f5; padding: 8px 12px; white-space: pre-line; }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 14px 0 0; font-size: 13px; }
nav a { color: var(--accent); text-decoration: none; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px;
  margin: 14px 0; }
.card { background: var(--back); border: 1px solid var(--line); border-radius: 6px; padding: 10px 12px;
  min-width: 0; }
.card b { display: block; font-size: 19px; font-weight: 600; overflow-wrap: anywhere; }
.card span { color: var(--soft); font-size: 12px; }
.wide { overflow-x: auto; margin: 10px 0; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 6px 0; }
th, td { padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
td.word, th.word { text-align: left; white-space: normal; overflow-wrap: break-word; max-width: 46ch; }
tr.marked td { background: #fffbea; font-weight: 600; }
figure { margin: 14px 0; }
figure .wide { margin: 0; }
figure svg { width: 100%; min-width: 720px; height: auto; display: block; }
@media print { figure svg { min-width: 0; } h2 { break-after: avoid; }
  figure, table { break-inside: avoid; } nav { display: none; } }
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
<p class="soft">{{ subtitle }}</p>
<nav>{% for section in sections %}<a href="#{{ section.name }}">{{ section.title }}</a>{% endfor %}</nav>
{% for section in sections %}
<section id="{{ section.name }}">
<h2>{{ section.title }}</h2>
{% for block in section.blocks %}
{% if block.text is defined %}
<p{% if block.warns %} class="warns"{% endif %}>{{ block.text }}</p>
{% elif block.entries is defined %}
<div class="cards">{% for name, value in block.entries %}
<div class="card"><b>{{ value }}</b><span>{{ name }}</span></div>{% endfor %}
</div>
{% elif block.header is defined %}
<div class="wide"><table>
{% if block.title %}<caption>{{ block.title }}</caption>{% endif %}
<thead><tr>{% for name in block.header -%}
<th{% if loop.index0 in block.words %} class="word"{% endif %}>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in block.rows[:block.most] %}
<tr{% if loop.index0 in block.marked %} class="marked"{% endif %}>{% for cell in row -%}
<td{% if loop.index0 in block.words %} class="word"{% endif %}>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table></div>
{% if block.rows | length > block.most %}
<p class="note">The first {{ block.most }} of {{ "{:,}".format(block.rows | length) }} rows are shown.</p>
{% endif %}
{% if block.note %}<p class="note">{{ block.note }}</p>{% endif %}
{% else %}
<figure><div class="wide">{{ block.svg | safe }}</div><figcaption>{{ block.caption }}</figcaption></figure>
{% endif %}
{% endfor %}
</section>
{% endfor %}
</main>
</body>
</html>
"""
