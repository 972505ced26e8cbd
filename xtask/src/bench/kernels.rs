//! What a network's time goes to, by kernel.

use super::Row;
use std::collections::BTreeMap;

/// Sums of one kernel's computations.
#[derive(Default)]
struct Sum {
    calls: usize,
    operations: f64,
    bytes: f64,
    seconds: f64,
}

/// A table in Markdown of the kernels that took the longest first. Products are compared with `gflops`, what else there
/// is with `read`, both of one thread.
pub(super) fn table(row: &Row, gflops: f64, read: f64) -> String {
    let mut sums: BTreeMap<&str, Sum> = BTreeMap::new();
    for c in &row.computed {
        let sum = sums.entry(c.kernel).or_default();
        sum.calls += 1;
        sum.operations += c.operations;
        sum.bytes += c.bytes;
        sum.seconds += c.seconds;
    }
    let mut rows: Vec<(&str, Sum)> = sums.into_iter().collect();
    rows.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
    let all: f64 = rows.iter().map(|r| r.1.seconds).sum();
    let (calls, workspace) = (row.computed.len(), row.workspace as f64 / 1e6);
    let mut out = format!("\n{}: {calls} calls, {workspace:.0} MB of workspace\n\n", row.what);
    out += "| kernel | calls | s | share | GFLOP/s | GB/s | of ceiling |\n|---|---|---|---|---|---|---|\n";
    for (kernel, Sum { calls, operations, bytes, seconds }) in rows {
        let seconds = seconds.max(1e-9);
        let (speed, rate) = (operations / seconds / 1e9, bytes / seconds / 1e9);
        let ceiling = if operations > 0.0 { speed / gflops } else { rate / read };
        out += &format!(
            "| {kernel} | {calls} | {seconds:.3} | {:.1} % | {speed:.0} | {rate:.1} | {:.0} % |\n",
            100.0 * seconds / all.max(1e-9),
            100.0 * ceiling
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Work;
    use sd_core::Computed;

    #[test]
    fn calls_of_a_kernel_are_one_row() {
        let one = |kernel, operations, bytes, seconds| Computed { kernel, operations, bytes, seconds };
        let all = [one("Join", 0.0, 4e9, 2.0), one("Linear", 6e9, 1.0, 1.0), one("Linear", 14e9, 1.0, 4.0)];
        let (computed, work) = (all.to_vec(), Work::default());
        let table = table(&Row { what: "step", work, seconds: 7.0, computed, workspace: 0 }, 8.0, 4.0);
        let rows: Vec<&str> = table.lines().skip(5).collect();
        let linear = "| Linear | 2 | 5.000 | 71.4 % | 4 | 0.0 | 50 % |";
        assert_eq!(rows, [linear, "| Join | 1 | 2.000 | 28.6 % | 0 | 2.0 | 50 % |"]);
    }
}
