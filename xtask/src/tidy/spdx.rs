//! Just enough of SPDX licence expressions to hold crates to an allow-list.

use anyhow::{Result, bail};

/// Whether `expression` can be satisfied with licences that `allowed` accepts. `/` is the older spelling of `OR`.
pub(crate) fn satisfied(expression: &str, allowed: &dyn Fn(&str) -> bool) -> Result<bool> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let mut tokens = spaced.split_whitespace().peekable();
    let value = either(&mut tokens, allowed)?;
    match tokens.next() {
        None => Ok(value),
        Some(extra) => bail!("licence expression {expression:?}: unexpected {extra:?}"),
    }
}

type Tokens<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn either(tokens: &mut Tokens<'_>, allowed: &dyn Fn(&str) -> bool) -> Result<bool> {
    let mut value = both(tokens, allowed)?;
    while tokens.next_if_eq(&"OR").is_some() {
        value |= both(tokens, allowed)?;
    }
    Ok(value)
}

fn both(tokens: &mut Tokens<'_>, allowed: &dyn Fn(&str) -> bool) -> Result<bool> {
    let mut value = one(tokens, allowed)?;
    while tokens.next_if_eq(&"AND").is_some() {
        value &= one(tokens, allowed)?;
    }
    Ok(value)
}

fn one(tokens: &mut Tokens<'_>, allowed: &dyn Fn(&str) -> bool) -> Result<bool> {
    match tokens.next() {
        Some("(") => {
            let value = either(tokens, allowed)?;
            if tokens.next() != Some(")") {
                bail!("licence expression lacks a closing parenthesis");
            }
            Ok(value)
        }
        Some(id) if !matches!(id, "OR" | "AND" | "WITH" | ")") => {
            // An exception only grants more, so the licence alone decides.
            if tokens.next_if_eq(&"WITH").is_some() && tokens.next().is_none() {
                bail!("licence expression ends in WITH");
            }
            Ok(allowed(id))
        }
        other => bail!("licence expression: expected a licence, found {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions() {
        let allowed = |id: &str| ["MIT", "Apache-2.0"].contains(&id);
        for (expression, want) in [
            ("MIT", true),
            ("GPL-3.0", false),
            ("GPL-3.0 OR MIT", true),
            ("GPL-3.0/MIT", true),
            ("GPL-3.0 AND MIT", false),
            ("(MIT OR GPL-3.0) AND Unicode-3.0", false),
            ("Apache-2.0 WITH LLVM-exception OR GPL-3.0", true),
            ("GPL-2.0 OR (GPL-3.0 AND MIT)", false),
        ] {
            assert_eq!(satisfied(expression, &allowed).unwrap(), want, "{expression}");
        }
        for broken in ["", "MIT OR", "(MIT", "MIT MIT", "MIT WITH"] {
            assert!(satisfied(broken, &allowed).is_err(), "{broken:?}");
        }
    }
}
