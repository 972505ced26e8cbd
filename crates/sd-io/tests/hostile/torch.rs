//! Broken files of `torch.save`, opcode by opcode.

use crate::check;

/// A pickled text.
fn text(s: &str) -> Vec<u8> {
    [b"X", &(s.len() as u32).to_le_bytes()[..], s.as_bytes()].concat()
}

/// A pickled number.
fn number(n: i64) -> Vec<u8> {
    [b"\x8a\x08", &n.to_le_bytes()[..]].concat()
}

fn tuple(items: &[Vec<u8>]) -> Vec<u8> {
    [b"(", &items.concat()[..], b"t"].concat()
}

fn numbers(items: &[i64]) -> Vec<u8> {
    tuple(&items.iter().map(|&n| number(n)).collect::<Vec<_>>())
}

/// A reference to a storage.
fn storage(class: &str, key: &str, numel: i64) -> Vec<u8> {
    let class = format!("c{}\n", class.replace(' ', "\n")).into_bytes();
    let parts = [text("storage"), class, text(key), text("cpu"), number(numel)];
    [&tuple(&parts)[..], b"Q"].concat()
}

fn rebuild(storage: Vec<u8>, offset: i64, dims: &[i64], strides: &[i64]) -> Vec<u8> {
    let hooks = b"ccollections\nOrderedDict\n)R".to_vec();
    let args = tuple(&[storage, number(offset), numbers(dims), numbers(strides), b"\x89".to_vec(), hooks]);
    [b"ctorch._utils\n_rebuild_tensor_v2\n", &args[..], b"R"].concat()
}

/// A tensor of f32.
pub(crate) fn tensor(key: &str, numel: i64, offset: i64, dims: &[i64], strides: &[i64]) -> Vec<u8> {
    rebuild(storage("torch FloatStorage", key, numel), offset, dims, strides)
}

/// A pickle of a dictionary.
pub(crate) fn dict(items: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let items: Vec<u8> = items.iter().flat_map(|(k, v)| [text(k), v.clone()].concat()).collect();
    [b"\x80\x02}(", &items[..], b"u."].concat()
}

/// A zip archive of these members, none of them compressed.
pub(crate) fn zip(members: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in members {
        let size = (data.len() as u32).to_le_bytes();
        let common =
            [&[0; 2][..], &[0; 2], &[0; 4], &[0; 4], &size, &size, &(name.len() as u16).to_le_bytes(), &[0; 2]];
        let common = common.concat();
        directory.extend([b"PK\x01\x02", &[20, 0, 20, 0][..], &common, &[0; 10]].concat());
        directory.extend((out.len() as u32).to_le_bytes());
        directory.extend(name.as_bytes());
        out.extend([b"PK\x03\x04", &[20, 0][..], &common, name.as_bytes(), data].concat());
    }
    let (start, len, count) = (out.len() as u32, directory.len() as u32, members.len() as u16);
    out.extend(directory);
    out.extend([b"PK\x05\x06", &[0; 4][..], &count.to_le_bytes(), &count.to_le_bytes()].concat());
    out.extend([&len.to_le_bytes()[..], &start.to_le_bytes(), &[0; 2]].concat());
    out
}

/// The layout before PyTorch 1.6: the object, the keys and counts of the storages, and the data of all.
pub(crate) fn legacy(object: &[u8], storages: &[(&str, u64)], data: &[u8]) -> Vec<u8> {
    let mut out = b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}.".to_vec();
    out.extend_from_slice(object);
    let keys: Vec<u8> = storages.iter().flat_map(|(key, _)| text(key)).collect();
    out.extend([b"\x80\x02](", &keys[..], b"e."].concat());
    let mut rest = data;
    for (_, count) in storages {
        out.extend(count.to_le_bytes());
        let (part, tail) = rest.split_at(rest.len().min(*count as usize * 4));
        out.extend_from_slice(part);
        rest = tail;
    }
    out.extend_from_slice(rest);
    out
}

/// A zip archive with this pickle and a storage "0" of 16 bytes.
fn archive(pickle: &[u8]) -> Vec<u8> {
    zip(&[("m/data.pkl", pickle), ("m/data/0", &[1; 16])])
}

#[test]
fn tensors_that_do_not_fit() {
    let one = |t: Vec<u8>| archive(&dict(&[("w", t)]));
    let typed = |class: &str| one(rebuild(storage(class, "0", 4), 0, &[4], &[1]));
    let max = i64::MAX;
    check(vec![
        (
            "past the storage",
            one(tensor("0", 4, 0, &[5], &[1])),
            &["tensor w: [5] f32", "reaches byte 20 of storage 0, which has 16"],
        ),
        (
            "offset past the storage",
            one(tensor("0", 4, 4, &[1], &[1])),
            &["tensor w: [1] f32 with offset 4", "reaches byte 20"],
        ),
        ("offset wraps", one(tensor("0", 4, max, &[1], &[1])), &["tensor w: "]),
        ("stride wraps", one(tensor("0", 4, 0, &[3], &[max])), &["tensor w: strides that leave any storage"]),
        (
            "stride past the storage",
            one(tensor("0", 4, 0, &[2, 2], &[4, 1])),
            &["tensor w: [2, 2] f32", "reaches byte 24"],
        ),
        ("negative offset", one(tensor("0", 4, -1, &[1], &[1])), &["a tensor whose offset is no number"]),
        (
            "negative stride",
            one(tensor("0", 4, 3, &[4], &[-1])),
            &["a tensor whose strides are no list of numbers"],
        ),
        ("negative axis", one(tensor("0", 4, 0, &[-4], &[1])), &["a tensor whose shape is no list of sizes"]),
        (
            "stride of zero",
            one(tensor("0", 4, 0, &[1 << 40], &[0])),
            &["tensor w: [1099511627776] with strides [0] repeats elements"],
        ),
        ("product wraps", one(tensor("0", 4, 0, &[1 << 33, 1 << 33], &[1, 1])), &["tensor w: the product of"]),
        ("six axes", one(tensor("0", 4, 0, &[1; 6], &[1; 6])), &["a tensor with 6 axes, at most 5"]),
        ("strides of other rank", one(tensor("0", 4, 0, &[2, 2], &[1])), &["tensor w: 2 axes and 1 strides"]),
        ("storage not there", one(tensor("7", 4, 0, &[4], &[1])), &["tensor w: the archive lacks m/data/7"]),
        (
            "storage too short",
            one(tensor("0", 5, 0, &[1], &[1])),
            &["storage 0 has 16 bytes, too few for 5 elements of 4"],
        ),
        (
            "endless key",
            one(tensor(&"0".repeat(5000), 4, 0, &[4], &[1])),
            &["a storage whose key has 5000 bytes, at most 256"],
        ),
        ("storage size wraps", one(tensor("0", max, 0, &[1], &[1])), &["storage 0 has 16 bytes, too few for"]),
        ("complex", typed("torch ComplexFloatStorage"), &["names torch.ComplexFloatStorage"]),
        ("quantised", typed("torch QInt8Storage"), &["names torch.QInt8Storage"]),
        ("bytes without a type", typed("torch.storage UntypedStorage"), &["storage 0 has no known element type"]),
        ("no storage", one(rebuild(b"N".to_vec(), 0, &[4], &[1])), &["a tensor without a storage"]),
        (
            "name twice",
            archive(&dict(&[("w", tensor("0", 4, 0, &[4], &[1])), ("w", tensor("0", 4, 0, &[2], &[1]))])),
            &["tensor w appears twice: [4] f32 and [2] f32"],
        ),
        (
            "long name",
            archive(&dict(&[(&"n".repeat(5000), tensor("0", 4, 0, &[4], &[1]))])),
            &["a name of 5000 bytes: "],
        ),
        ("no tensor", archive(&dict(&[("a", number(1))])), &["there is no tensor in this PyTorch file"]),
        (
            "only arrays",
            archive(&dict(&[("a", b"cnumpy.core.multiarray\n_reconstruct\n)R".to_vec())])),
            &["there is no tensor in this PyTorch file; it holds an object of NumPy"],
        ),
    ]);
}

#[test]
fn pickles() {
    let run = |ops: &[u8]| archive(&[b"\x80\x02", ops].concat());
    let nested = [b"}X\x01\0\0\0a".repeat(40), b"N".to_vec(), b"s".repeat(40), b".".to_vec()].concat();
    // Forty dictionaries, each holding the one before twice.
    let mut shared = tensor("0", 4, 0, &[4], &[1]);
    shared = [&shared[..], b"q\0"].concat();
    for i in 0..14u8 {
        shared.extend([b"}(X\x01\0\0\0ah", &[i][..], b"X\x01\0\0\0bh", &[i], b"uq", &[i + 1]].concat());
    }
    shared.push(b'.');
    // A list of 2,048 pairs that becomes 1,100 dictionaries.
    let pairs = [b"]q\0(".to_vec(), b"NN\x86".repeat(2048), b"e0".to_vec()].concat();
    let copies = [pairs, b"ccollections\nOrderedDict\nq\x010".to_vec(), b"h\x01h\0\x85R0".repeat(1100)].concat();
    check(vec![
        ("empty pickle", run(b"."), &["pickle"]),
        ("more values than any model", run(&[b'N'; 3_000_000]), &["builds more than 2097152 values"]),
        ("no end", run(b"N"), &["pickle takes 1 bytes at byte 3, the file has 0 more"]),
        ("underflow", run(b"s."), &["pickle, byte 2: takes more values than there are"]),
        ("below the mark", run(b"N(0."), &["pickle, byte 4: takes more values"]),
        ("no mark", run(b"Nt."), &["ends a group that has not begun"]),
        ("unknown opcode", run(b"\xff."), &["unknown opcode 0xff"]),
        ("extension", run(b"\x82\x01."), &["an extension code"]),
        ("buffer", run(b"\x97."), &["a buffer outside of the pickle"]),
        ("protocol", run(b"\x80\x09."), &["protocol 9 is not known"]),
        ("memo", run(b"h\x05."), &["recalls value 5, which was not kept"]),
        ("text past the end", run(b"X\xff\xff\xff\xffab."), &["text takes 4294967295 bytes at byte 7"]),
        (
            "bytes past the end",
            run(b"\x8e\xff\xff\xff\xff\xff\xff\xff\xff."),
            &["bytes takes 18446744073709551615 bytes"],
        ),
        ("line without end", run(b"cposix"), &["name at byte 3 does not end"]),
        ("append to a number", run(b"K\x01Na."), &["appends to what is no list"]),
        ("key of a number", run(b"K\x01NNs."), &["sets a key of what is no dictionary"]),
        ("key without value", run(b"}(Nu."), &["a key without a value"]),
        ("copies of one list", run(&copies), &["copies more than 2097152 pairs into dictionaries"]),
        ("call of a number", run(b"K\x01)R."), &["calls what is no class"]),
        ("foreign object", run(b"K\x01Q."), &["refers to an object outside of the pickle that is no storage"]),
        (
            "storage without a key",
            run(b"(X\x07\0\0\0storagectorch\nFloatStorage\nNNK\x01tQ."),
            &["a storage without a key"],
        ),
        (
            "system",
            run(b"cos\nsystem\n(X\x02\0\0\0lstR."),
            &["names os.system, which is neither a tensor nor plain data; nothing in the file is run"],
        ),
        ("eval", run(b"c__builtin__\neval\n(X\x01\0\0\0atR."), &["names __builtin__.eval"]),
        ("getattr", run(b"cbuiltins\ngetattr\n."), &["names builtins.getattr"]),
        ("stacked name", run(b"X\x05\0\0\0posixX\x06\0\0\0system\x93."), &["names posix.system"]),
        ("instance", run(b"(X\x01\0\0\0aisubprocess\nPopen\n."), &["names subprocess.Popen"]),
        ("numpy hides nothing", run(b"cnumpyx\nf\n."), &["names numpyx.f"]),
        ("name of control characters", run(b"ca\x1b[0m\nf\n."), &["names a\\u{1b}[0m.f"]),
        (
            "rebuild of itself",
            run(b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._tensor\n_rebuild_from_type_v2\nN)NtR."),
            &["a tensor that rebuilds itself"],
        ),
        ("deep", run(&nested), &["nested deeper than 16"]),
        ("shared without end", run(&shared), &["its dictionaries share so much that they do not end"]),
        ("cycle", run(b"}q\0X\x01\0\0\0ah\0s."), &["share so much that they do not end"]),
        ("list in itself", run(b"]q\0h\0h\0h\0h\0h\0h\0(h\0h\0h\0h\0e."), &["dictionaries"]),
    ]);
}

#[test]
fn archives() {
    let pickle = dict(&[("w", tensor("0", 4, 0, &[4], &[1]))]);
    let good = archive(&pickle);
    let end = good.len() - 22;
    let with = |at: usize, bytes: &[u8]| {
        let mut f = good.clone();
        f[at..at + bytes.len()].copy_from_slice(bytes);
        f
    };
    let directory = u32::from_le_bytes(good[end + 16..end + 20].try_into().unwrap()) as usize;
    // The second member of the directory, that of the storage.
    let second = directory + 46 + "m/data.pkl".len();
    check(vec![
        (
            "no end record",
            good[..end].to_vec(),
            &["a PyTorch checkpoint (zip) whose end is missing; the file is cut off", "download it again"],
        ),
        ("cut in the directory", good[..directory + 20].to_vec(), &["whose end is missing"]),
        ("directory outside", with(end + 16, &[0xf0; 4]), &["claims 2 members", "it is damaged"]),
        ("too many members", with(end + 10, &[0xfe, 0xff]), &["claims 65534 members"]),
        ("no 64-bit record", with(end + 10, &[0xff, 0xff]), &["lacks its 64-bit end record"]),
        ("broken member", with(directory, b"XX"), &["member 0 of the archive", "no member of a zip archive"]),
        ("compressed", with(second + 10, &[8]), &["m/data/0: is compressed, which PyTorch never does"]),
        ("member outside", with(second + 42, &[0xf0; 4]), &["m/data/0: lies outside of the"]),
        ("no local header", with(second + 42, &[1, 0, 0, 0]), &["m/data/0: no member starts at byte 1"]),
        (
            "size outside",
            with(second + 20, &[0xf0, 0xf0, 0xf0, 0, 0xf0, 0xf0, 0xf0, 0]),
            &["m/data/0: lies outside of the"],
        ),
        ("size without a 64-bit one", with(second + 20, &[0xff; 8]), &["member 1 of the archive"]),
        ("name twice", zip(&[("m/data.pkl", &pickle), ("m/data.pkl", &pickle)]), &["m/data.pkl appears twice"]),
        (
            "other zip",
            zip(&[("model.safetensors", b"x"), ("readme", b"y")]),
            &[
                "is a zip archive that PyTorch has not written; it holds model.safetensors, readme",
                "unpack the archive",
            ],
        ),
        ("program", zip(&[("m/data.pkl", &pickle), ("m/constants.pkl", b"x")]), &["is a TorchScript program"]),
    ]);
}

#[test]
fn rows_of_pickles() {
    let object = dict(&[("w", tensor("0", 4, 0, &[4], &[1]))]);
    let two = dict(&[("w", tensor("0", 4, 0, &[4], &[1])), ("v", tensor("0", 3, 0, &[3], &[1]))]);
    let good = legacy(&object, &[("0", 4)], &[1; 16]);
    let mut protocol = good.clone();
    protocol[18] = 1;
    check(vec![
        ("plain pickle", b"\x80\x04}.".to_vec(), &["a Python pickle that is no PyTorch checkpoint"]),
        ("only magic", good[..15].to_vec(), &["pickle takes 1 bytes at byte 15, the file has 0 more"]),
        ("other protocol", protocol, &["a protocol that is not 1001"]),
        ("cut off", good[..good.len() - 1].to_vec(), &["the file is cut off in storage 0"]),
        ("other count", legacy(&object, &[("0", 3)], &[1; 12]), &["storage 0 has 3 elements, its tensors say 4"]),
        ("bytes left over", legacy(&object, &[("0", 4)], &[1; 19]), &["3 unused bytes after the last storage"]),
        ("storage of nobody", legacy(&object, &[("9", 4)], &[1; 16]), &["no tensor has storage 9"]),
        ("storage missing", legacy(&object, &[], &[]), &["tensor w: the file has no storage 0"]),
        ("storage twice", legacy(&object, &[("0", 4), ("0", 4)], &[1; 32]), &["storage 0 is listed twice"]),
        ("two sizes", legacy(&two, &[("0", 4)], &[1; 16]), &["storage 0 has two types or sizes"]),
    ]);
}

/// A tar archive of these members.
fn tar(members: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, data) in members {
        let mut head = vec![0; 512];
        head[..name.len()].copy_from_slice(name.as_bytes());
        head[124..135].copy_from_slice(format!("{:011o}", data.len()).as_bytes());
        head[257..262].copy_from_slice(b"ustar");
        out.extend(head);
        out.extend(data);
        out.resize(out.len().next_multiple_of(512), 0);
    }
    out.resize(out.len() + 1024, 0);
    out
}

#[test]
fn tar_archives() {
    let pickled = |items: &[u8]| [b"\x80\x02", items, b"."].concat();
    let storages = |numel: u64, views: &[u8]| {
        let described = pickled(&tuple(&[number(11), text("cpu"), b"ctorch\nFloatStorage\n".to_vec()]));
        [&pickled(b"K\x01")[..], &described, &numel.to_le_bytes(), &[1; 16], &pickled(views)].concat()
    };
    let none = storages(4, b"]");
    let tensors = |storage: i64, axes: u32| {
        let described = pickled(&tuple(&[number(21), number(storage), b"N".to_vec()]));
        let mut out = [pickled(b"K\x01"), described, axes.to_le_bytes().to_vec(), vec![0; 4]].concat();
        for n in [4u64, 1, 0] {
            out.extend(n.to_le_bytes());
        }
        out
    };
    let main = pickled(b"}X\x01\0\0\0wK\x15Qs");
    let all = |s: Vec<u8>, t: Vec<u8>, p: Vec<u8>| tar(&[("storages", s), ("tensors", t), ("pickle", p)]);
    let view = tuple(&[number(12), number(11), number(2), number(9)]);
    let mut outside = all(none.clone(), tensors(11, 1), main.clone());
    outside[124..135].copy_from_slice(b"77777777777");
    check(vec![
        (
            "other tar",
            tar(&[("model.safetensors", vec![1])]),
            &["is a tar archive that PyTorch has not written: it lacks storages, it holds model.safetensors"],
        ),
        ("member outside", outside, &["storages leaves the tar archive"]),
        (
            "storage cut off",
            all(storages(1 << 60, b"]"), tensors(11, 1), main.clone()),
            &["storages: ", "the file is cut off in storage 11"],
        ),
        (
            "view outside",
            all(storages(4, &[b"](", &view[..], b"e"].concat()), tensors(11, 1), main.clone()),
            &["a view leaves storage 11"],
        ),
        ("views of text", all(storages(4, &text("a")), tensors(11, 1), main.clone()), &["the views are no list"]),
        (
            "tensor of no storage",
            all(none.clone(), tensors(5, 1), main.clone()),
            &["tensor 21 has storage 5, which is not there"],
        ),
        ("axes", all(none.clone(), tensors(11, 900), main.clone()), &["tensor 21 has 900 axes"]),
        (
            "no such tensor",
            all(none.clone(), tensors(11, 1), pickled(b"}X\x01\0\0\0wK\x09Qs")),
            &["refers to object 9, which the file lacks"],
        ),
        ("class", all(none, tensors(11, 1), pickled(b"cos\nsystem\n")), &["names os.system"]),
    ]);
}
