"""The workflow templates of the pack, `workflows/*.json` and their thumbnails, written from one description each.

python tools/pack.py templates.command            writes them
python tools/pack.py templates.command --check    says which file is not what the description gives
"""
